"""qfleet.Run: stepping by hand equals training, looking has no effect, and mistakes are explained."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from run_kit import DDPG, DQN, NOISY_C51, R2D2, arguments, metrics, weights

import qfleet
from qfleet import Run, UserError, api
from qfleet.runconfig import auto
from qfleet.runs.directory import RunDirectory
from qfleet.runs.run_state import run_state
from qfleet.training import evaluation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

AGENTS = {"dqn": DQN, "c51": NOISY_C51, "r2d2": R2D2, "ddpg": DDPG}
SCHEDULED = ["eval.period_steps=120", "checkpoint.period_steps=150", "total_steps=300"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def new_run(recipe=DQN, *overrides: str, **keywords) -> Run:
    name, pairs = arguments(recipe, "run.name=x", *overrides)
    return Run(name, pairs, **keywords)


def trained(recipe, *overrides: str) -> Path:
    name, pairs = arguments(recipe, "run.name=whole", *overrides)
    return api.train(name, pairs).directory


def assert_equal(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other) and len(metrics(one)) > 3
    assert weights(one) == weights(other)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_run_that_is_stepped_and_looked_at_equals_one_that_is_trained(agent):
    whole = trained(AGENTS[agent], *SCHEDULED)
    run = new_run(AGENTS[agent], *SCHEDULED)
    while not run.done:
        run.step(53)
        look_at(run)
    run.close()
    assert_equal(whole, run.directory)


def look_at(run: Run) -> None:
    torch.rand(3)
    np.random.rand(3)
    if run.updates:
        run.replay.sample(8).obs(0)
    agent = run.agent
    obs = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in agent.spec.observation.items()}
    agent.act(obs, epsilon=0.5)
    if agent.spec.box is None:
        agent.q_values(obs)
    run.evaluate(episodes=2, epsilon=0.1)
    run.save()
    assert run.metrics.keys() >= {"step"} or run.steps < 50
    assert repr(run) and run.replay.metrics() and run.network and run.records is not None


def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not():
    exact = ["run.exact_resume=true", "checkpoint.period_steps=200", "eval.period_steps=150", "total_steps=600"]
    whole = trained(DQN, *exact)
    run = new_run(DQN, *exact)
    run.step(360)
    assert 200 <= run.stop().saved_at < 202, "the last scheduled checkpoint, at which episodes begin"
    assert run.done
    with Run.resume("x") as resumed:
        resumed.until(steps=430)
        look = resumed.evaluate(episodes=2)
        assert look.episodes == 2
        resumed.train()
    assert weights(whole) == weights(run.directory)
    evaluations = [[(each["step"], each["eval/mean_reward"]) for each in metrics(path) if "eval/mean_reward" in each]
                   for path in (whole, run.directory)]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 4


def test_steps_after_a_checkpoint_off_schedule_are_not_lost():
    """Only a scheduled checkpoint resumes exactly, so there is no reason to go back to another one."""
    exact = ["run.exact_resume=true", "checkpoint.period_steps=200", "total_steps=600"]
    run = new_run(DQN, *exact)
    run.step(240)
    run.save()
    run.step(40)
    assert 280 <= run.stop().saved_at == run.steps
    with Run.resume("x") as resumed:
        resumed.step(40)
        assert 320 <= resumed.stop().saved_at == resumed.steps
    with Run.resume("x") as resumed:
        resumed.until(steps=430)
        assert 400 <= resumed.stop().saved_at < 402
    with Run.resume("x") as resumed:
        resumed.step(20)
        assert 400 <= resumed.stop().saved_at < 402, "resumed from a scheduled one"


def test_steps_count_environment_steps_in_whole_rounds():
    """A lane whose episode has ended makes no step in the next round."""
    with new_run(DQN, "env.lanes=4", "total_steps=100") as run:
        assert (run.step(), run.steps) == (4, 4)
        assert (run.step(6), run.steps) == (8, 12)
        taken = run.step(30)
        assert 30 <= taken < 34 and run.steps == 12 + taken
        assert run.step(1000) == run.steps - 12 - taken and run.done and 100 <= run.steps < 104
        assert run.step(5) == 0


def test_until_stops_at_whichever_comes_first():
    with new_run(DQN, "total_steps=1000") as run:
        assert run.until(steps=20).steps == 20
        assert run.until(updates=3, steps=900).updates >= 3 and run.steps < 900
        assert run.until(episodes=2, steps=900).episodes >= 2
        at = run.steps + 10
        reached = run.until(lambda run: run.steps >= at).steps
        assert at <= reached < at + 2
        assert run.until(steps=5).steps == reached, "it was there already"


def test_a_run_shows_its_state():
    with new_run(DQN, "total_steps=1000") as run:
        assert repr(run) == "Run(CartPole-v1, dqn, 0 of 1,000 steps, runs/x)"
        assert (run.steps, run.updates, run.episodes, run.best, run.metrics) == (0, 0, 0, None, {})
        with pytest.raises(UserError, match="no complete window yet: step the run further"):
            run.replay.sample(1)
        run.step(200)
        assert 150 <= run.records[-1]["step"] == run.metrics["step"] <= 201
        assert run.metrics["train/loss"] > 0 and len(run.replay) > 100
        batch = run.replay.sample(5)
        assert batch.obs(0)["obs"].shape == (5, 4) and batch.rows["reward"].shape == (5, 4)
        assert run.network is run.network and sum(1 for _ in run.network.parameters()) == 4
        result = run.evaluate(episodes=3)
        assert (result.episodes, result.checkpoint) == (3, None) and run.best is None


def test_time_between_two_calls_is_not_training_time():
    with new_run(DQN, "total_steps=100") as run:
        meter = run._core.meter
        assert (before := meter.seconds) == meter.seconds, "not since it was created either"
        run.step(20)
        assert before < (after := meter.seconds) == meter.seconds
        run.stop()
    assert after < meter.seconds == meter.seconds


def test_q_values_are_those_that_acting_compares():
    with new_run(DQN, "total_steps=200") as run:
        run.step(200)
        agent, batch = run.agent, run.replay.sample(6).obs(0)["obs"].numpy()
    values = agent.q_values(batch)
    assert values.shape == (6, 2) and values.dtype == np.float32
    assert values.argmax(1).tolist() == agent.act(batch).tolist()
    assert np.allclose(agent.q_values(batch[0]), values[0])
    with torch.no_grad():
        assert np.allclose(agent.network({"obs": torch.from_numpy(batch)}).numpy(), values)
    with pytest.raises(UserError, match="contains NaN or infinity"):
        agent.q_values(np.full(4, np.nan))


def test_actions_without_values_are_explained():
    with new_run(DDPG) as run, pytest.raises(UserError, match="algo=ddpg has no values of actions: its actions"):
        run.agent.q_values(np.zeros(3, np.float32))


def test_a_run_that_was_closed_says_so():
    run = new_run(DQN, "total_steps=400")
    run.step(100)
    run.close()
    run.close()
    for use in (run.step, run.save, lambda: run.until(steps=300)):
        with pytest.raises(UserError, match=r"runs/x is closed: qfleet.Run.resume\('runs/x'\) continues it"):
            use()
    assert run.stop().reason == run.train().reason == "stopped"
    assert run.steps >= 100 and run.agent.policy.version == run.updates, "it can still be looked at"
    assert repr(run) == f"Run(CartPole-v1, dqn, {run.steps} of 400 steps, closed, runs/x)"
    assert run_state(RunDirectory(run.directory)) == "stopped"
    with Run.resume("x") as resumed:
        assert resumed.save() == Path(f"runs/x/checkpoints/step-{run.steps:012}"), "nothing has changed since"
        assert resumed.train().reason == "total_steps"
    with Run.resume("x") as again:
        assert again.done and again.train().already_finished
        with pytest.raises(UserError, match="was finished already: pass a larger total_steps"):
            again.step()


@pytest.mark.parametrize(("error", "ending"), [
    (ZeroDivisionError("by zero"), {"reason": "failed", "error": "ZeroDivisionError: by zero"}),
    (KeyboardInterrupt(), {"reason": "interrupted", "error": ""}),
    (SystemExit(0), {"reason": "stopped", "error": ""})])
@pytest.mark.parametrize("steps", [0, 100])
def test_an_error_in_the_with_block_is_recorded_as_the_end_of_the_run(error, ending, steps):
    with pytest.raises(type(error)), new_run(DQN) as run:
        if steps:
            run.step(steps)
        raise error
    assert RunDirectory(run.directory).ending() == ending
    assert bool(list(run.directory.glob("checkpoints/step-*"))) == bool(steps), "the run was saved all the same"


def test_an_error_after_the_end_of_a_run_does_not_change_how_it_ended():
    with pytest.raises(ZeroDivisionError), new_run(DQN, "total_steps=100") as run:
        run.step(100)
        raise ZeroDivisionError
    assert RunDirectory(run.directory).ending()["reason"] == "total_steps"


class CtrlC(gymnasium.Wrapper):
    """Sends Ctrl-C to its own process at a step of the final episodes."""

    armed = False

    def step(self, action):
        if CtrlC.armed:
            CtrlC.armed = False
            os.kill(os.getpid(), signal.SIGINT)
        return self.env.step(action)


def test_the_best_policy_is_scored_by_fresh_episodes_at_the_end(monkeypatch):
    result = new_run(DQN, "total_steps=200", "eval.period_steps=60", "eval.final_episodes=6").train()
    best = next(result.directory.glob("checkpoints/best-*")).name
    assert (result.score.episodes, result.score.seed, result.score.checkpoint) == (6, 1001, best)
    agent = api.load(result)
    again = api.evaluate(result, episodes=6, seed=1001, lanes=4)
    assert again.mean_reward == result.score.mean and again.standard_error == result.score.standard_error
    assert agent.checkpoint.path.name == best and api.list_runs()[0].score == result.score
    recorded = metrics(result.directory)
    finished = api.resume(result)
    assert finished.already_finished and finished.score == result.score and metrics(result.directory) == recorded
    monkeypatch.setattr("qfleet.launch.final_score.FIRST_SEED", 2000)
    assert api.resume(result, ["total_steps=300"]).score.seed == 2001, "the run has ended anew"


def test_the_final_episodes_change_neither_training_nor_checkpoints():
    for name, episodes in (("scored", 5), ("unscored", 0)):
        result = new_run(DQN, "total_steps=200", f"run.name={name}", f"eval.final_episodes={episodes}").train()
        assert (result.score is None) == (name == "unscored")
    assert_equal(Path("runs/scored"), Path("runs/unscored"))


def test_a_run_that_the_program_ends_is_not_scored_unless_it_was_at_its_end():
    with new_run(DQN, "eval.period_steps=60") as run:
        run.step(100)
    assert run.train().best is not None and run.train().score is None
    with Run.resume("x", total_steps=200) as run:
        run.step(100)
    assert run.train().reason == "total_steps" and run.train().score.episodes == 20


def test_ctrl_c_skips_the_score_of_a_finished_run():
    run = new_run(DQN, "total_steps=100", env=gymnasium.make("CartPole-v1", max_episode_steps=50),
                  wrappers=[CtrlC])
    run.step(100)
    finish = type(run._attempt.run).finish

    def finish_then_arm(learner_run):
        reason = finish(learner_run)
        CtrlC.armed = True
        return reason

    run._attempt.run.finish = lambda: finish_then_arm(run._attempt.run)
    result = run.train()
    assert (result.reason, result.exit_code, result.score) == ("total_steps", 0, None) and not CtrlC.armed
    assert RunDirectory(result.directory).ending() == {"reason": "total_steps", "error": ""}


def test_a_finished_run_is_unlocked_when_it_is_opened_and_says_what_continues_it():
    new_run(DQN, "total_steps=200").train()
    finished = Run.resume("x")
    assert "steps, finished: resume it with a larger total_steps, runs/x)" in repr(finished)
    for use in (lambda: finished.until(updates=10_000), finished.save):
        with pytest.raises(UserError, match="was finished already: pass a larger total_steps"):
            use()
    with Run.resume("x", total_steps=400) as run:
        assert run.step(10) >= 10
    assert finished.train().already_finished


def test_a_run_that_was_never_stepped_leaves_nothing_to_do():
    run = new_run(DQN)
    run.close()
    with pytest.raises(UserError, match="is closed"):
        run.step()
    assert run_state(RunDirectory(run.directory)) == "stopped" and not list(run.directory.glob("checkpoints/*"))
    assert Run.resume("x", total_steps=100).train().reason == "total_steps"


def test_a_run_can_be_opened_once_at_a_time():
    with new_run(DQN, "total_steps=400") as run:
        run.step(100)
        with pytest.raises(UserError, match=r"in use by this process; close the open qfleet\.Run"):
            Run.resume("x")
        assert run.step(10) >= 10


def test_saved_checkpoints_can_be_loaded_while_the_run_goes_on():
    with new_run(DQN, "total_steps=400", "checkpoint.keep=9") as run:
        run.step(100)
        path, at = run.save(), run.steps
        run.step(100)
        assert path.name == f"step-{at:012}"
        assert 0 < qfleet.load(path).policy.version < run.updates
        assert run.stop().saved_at == run.steps


@pytest.mark.parametrize("mistake", [
    lambda run: run.step(0), lambda run: run.step(1.5), lambda run: run.step(True), lambda run: run.until(),
    lambda run: run.until(5), lambda run: run.until(steps=-1), lambda run: run.evaluate(episodes=0),
    lambda run: run.evaluate(epsilon=2), lambda run: run.replay.sample(0)])
def test_mistakes_are_refused_and_leave_the_run_usable(mistake):
    with new_run(DQN, "total_steps=100") as run:
        with pytest.raises(UserError, match=r"must be|give a condition"):
            mistake(run)
        assert run.step(10) == 10


def test_a_metric_that_is_not_there_is_explained():
    with new_run(DQN, "total_steps=200") as run:
        with pytest.raises(KeyError, match=r"^metrics: there is no record yet, .* run.log_period_steps=50 steps: use "):
            run.until(lambda run: run.metrics["train/loss"] > 0)
        run.step(110)
        with pytest.raises(UserError, match=r"did you mean train/loss or .*\? Otherwise use metrics.get\('train/los'"):
            run.metrics["train/los"]
        assert run.metrics.get("train/los", 3) == 3 and "train/los" not in run.metrics


def test_an_error_in_a_condition_leaves_the_run_usable():
    def wrong(run: Run) -> bool:
        return run.steps > 40 and run.metrics["no/such/tag"] > 0

    with new_run(DQN, "total_steps=100") as run:
        with pytest.raises(KeyError):
            run.until(wrong)
        assert 40 < run.steps < 44 and run.train().reason == "total_steps"


class Interrupting:
    """Callback that presses Ctrl-C at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, run) -> None:
        if run.steps >= self.at:
            self.at = 1_000_000
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_a_run_usable():
    """It ends the call after a whole round, and the run goes on as if nothing had happened."""
    whole = trained(DQN, *SCHEDULED)
    with new_run(DQN, *SCHEDULED, callbacks=[Interrupting(60)]) as run:
        with pytest.raises(KeyboardInterrupt):
            run.step(300)
        assert 60 <= run.steps < 62 and not run.done
        assert run.step(40) >= 40
        run.train()
    assert_equal(whole, run.directory)


def interrupt_evaluations(monkeypatch, times: int) -> None:
    """Press Ctrl-C once an evaluation has begun."""
    play = evaluation.evaluate

    def interrupted(*arguments, **keywords):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return play(*arguments, **keywords)

    monkeypatch.setattr(evaluation, "evaluate", interrupted)


def test_ctrl_c_waits_for_an_evaluation_that_has_begun(monkeypatch):
    """Otherwise it would be repeated a round later, with other weights."""
    whole = trained(DQN, *SCHEDULED)
    with new_run(DQN, *SCHEDULED) as run:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_evaluations(patch, times=1)
            run.step(300)
        assert 120 <= run.steps < 122 and run.best is not None and not run.done
        run.train()
    assert_equal(whole, run.directory)


def test_a_second_ctrl_c_does_not_wait_for_an_evaluation(monkeypatch):
    with new_run(DQN, *SCHEDULED) as run:
        interrupt_evaluations(monkeypatch, times=2)
        with pytest.raises(KeyboardInterrupt):
            run.step(300)
        assert run.best is None
        with pytest.raises(UserError, match="is closed"):
            run.step()


def test_a_condition_is_called_once_at_the_start_and_after_each_round():
    with new_run(DQN, "total_steps=100") as run:
        seen = []
        run.until(lambda run: seen.append(run.steps) or run.steps >= 8)
        assert seen == [0, 2, 4, 6, 8]
        run.until(lambda run: seen.append(run.steps) or True)
        assert seen[5:] == [8] and run.steps == 8


def test_ctrl_c_ends_train_with_a_checkpoint():
    result = new_run(DQN, "total_steps=400", callbacks=[Interrupting(60)]).train()
    assert (result.reason, result.exit_code, result.saved_at) == ("interrupted", 130, result.steps)


def test_the_callers_torch_settings_are_kept():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with new_run(DQN, "total_steps=100") as run:
            run.step(90)
            run.evaluate(episodes=1)
            assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == 2 and torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("override", ["actors=2", "sync=allreduce", "learners=2 sync=server"])
def test_runs_with_other_processes_are_left_to_train(override):
    with pytest.raises(UserError, match=r"trains in this process, and \S+ starts others: use qfleet.train"):
        new_run(DQN, *override.split())
    assert not Path("runs").exists()


def test_an_environment_object_is_given_again_to_resume_and_to_evaluate():
    pairs = arguments(DQN, "run.name=x")[1]
    pairs.remove("env.max_episode_steps=50")

    def make():
        return gymnasium.make("CartPole-v1", max_episode_steps=30)

    run = Run("vector", [*pairs, "total_steps=200"], env=lambda: make())
    run.step(100)
    assert max(run.evaluate(episodes=2).lengths) <= 30, "the run knows its environment"
    run.close()
    for use in (lambda **env: Run.resume("x", **env).close(), lambda **env: qfleet.resume("x", **env),
                lambda **env: qfleet.evaluate("x", episodes=1, **env)):
        forget_objects()
        with pytest.raises(UserError, match=r"was an object of the Python program .* pass it again, as env="):
            use()
        use(env=make)


def forget_objects() -> None:
    """As in another program."""
    from qfleet.config import objects

    objects._named.clear()


def test_the_loop_pauses_while_an_evaluator_process_waits():
    """Nothing is lost, and no process is taken for dead, while the caller of `step` thinks."""
    with new_run(DQN, "total_steps=600", "eval.process=true", "eval.period_steps=100",
                 "fleet.heartbeat_timeout_s=1") as run:
        run.until(lambda run: run.best is not None)
        time.sleep(3)
        result = run.train()
    assert result.reason == "total_steps" and result.best is not None
    assert "start 2" not in (run.directory / "logs/evaluator.log").read_text()


def test_a_run_uses_the_threads_that_were_planned_for_its_network(monkeypatch):
    """`run.threads` is open until the environment is known: images are worth several threads."""
    monkeypatch.setattr(auto, "thread_plan", lambda convolutions, cores: SimpleNamespace(torch=2 + convolutions))
    before, seen = torch.get_num_threads(), set()
    name, pairs = arguments(["catch", "env.kwargs.pixels=true", "agent.hidden=[16]"], "run.threads=null")
    with Run(name, pairs, total_steps=200, sinks=[lambda record: seen.add(torch.get_num_threads())]) as run:
        assert run.config.run.threads == 3
        run.train()
    assert seen == {3} and torch.get_num_threads() == before
