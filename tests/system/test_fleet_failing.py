"""Fleets that cannot go on: how they end, what they say, and what they leave."""

import signal

import pytest
from fleet_runs import SMALL, FleetRun, assert_goes_forward
from real_runs import newest, qfleet, records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
ONCE = [*SMALL, "actors=1", "total_steps=100000", "eval.period_steps=null", "checkpoint.period_steps=100",
        "fleet.actor_restarts=0", "run.name=x"]


def end_of(tmp_path, *words):
    """Exit code, complaints and the run of a fleet that ends by itself; nothing of it is left."""
    with FleetRun("train", *words, cwd=tmp_path) as fleet:
        code, _ = fleet.ended()
        fleet.assert_gone()
        return code, fleet.complaints, fleet.run


def test_an_environment_that_actors_cannot_make_ends_the_run_with_the_first_traceback(tmp_path):
    code, said, run = end_of(tmp_path, "fleet_envs:Breaks", *ONCE, "fleet.actor_restarts=1")
    assert code == 1, said
    assert "and 1 restart did not help; the first time it wrote" in said
    assert "fleet_envs:Breaks could not be built" in said and "OSError: the licence server is on holiday" in said
    assert said.count("Traceback (most recent call last)") == 1, said
    assert "logs/actor-" in said and list((run / "logs").glob("actor-*.log"))


def test_an_environment_beyond_repair_ends_the_run_which_is_saved(tmp_path):
    code, said, run = end_of(tmp_path, "toy/Faulty-v0", *ONCE, "env.kwargs={length: 20, raise_at: 8}",
                             "env.max_faults=30")
    assert code == 1, said
    assert "toy/Faulty-v0 failed 30 times" in said and "RuntimeError: set to fail at step 8" in said
    saved = newest(run)
    assert f"its last checkpoint is {saved.path.name}: qfleet resume runs/x" in said
    assert saved.manifest.step == records(run)[-1]["step"] > 100 and saved.manifest.updates > 0


@pytest.mark.parametrize(("env", "code", "words"), [
    ("toy/Faulty-v0", 1, "environment failed: toy/Faulty-v0 gave the reward nan in lane 0 at step 20"),
    ("fleet_envs:Lists", 2, "step must return the reward as one number, not a list"),
])
def test_a_reward_that_nothing_can_be_learned_from_ends_the_run_as_in_one_process(tmp_path, env, code, words):
    ended, said, _ = end_of(tmp_path, env, *ONCE, "fleet.actor_restarts=5", "env.kwargs={nan_reward_at: 70}")
    assert (ended, said.count(words)) == (code, 1), said
    assert "restart " not in said and "Traceback" not in said


def test_a_lack_of_memory_names_what_to_lower(tmp_path):
    code, said, _ = end_of(tmp_path, "fleet_envs:Exhausts", *ONCE)
    assert code == 1 and "out of memory: Unable to allocate" in said and "lower env.lanes=2 or actors=1" in said, said


def test_what_only_an_actor_finds_wrong_is_the_users_to_mend(tmp_path):
    """No restart helps against an environment that is another one over there."""
    code, said, _ = end_of(tmp_path, "fleet_envs:Elsewhere", *ONCE)
    assert code == 2, said
    assert "has 3 actions" in said and "2 actions" in said and "Traceback" not in said and "restart" not in said


def test_a_loss_that_is_not_finite_is_skipped_kept_and_in_the_end_the_end(tmp_path):
    """Also with restarts: the replay that made it so is saved with the rest."""
    code, said, run = end_of(tmp_path, "fleet_envs:Rich", *ONCE, "--restarts", "5", "learner.max_bad_updates=4")
    assert code == 1, said
    assert "not finite in 4 updates in a row" in said and "learner.learning_rate" in said
    assert "restart" not in said.replace("--restarts", ""), said
    assert records(run)[-1]["fault/bad_updates"] >= 4 and list((run / "faults").glob("*.safetensors"))
    assert all(value.isfinite().all() for value in newest(run).policy().values())


def test_a_learner_that_dies_ends_the_run_which_can_go_on(tmp_path):
    """Without --restarts. And the evaluator may die while the last evaluation is under way."""
    with FleetRun("train", "cartpole", *ONCE, cwd=tmp_path) as fleet:
        fleet.until(lambda: len(fleet.checkpoints) > 1)
        fleet.kill("learner")
        code, _ = fleet.ended()
        fleet.assert_gone()
        saved, said = newest(fleet.run), fleet.complaints
    assert code == 1 and "learner was killed by SIGKILL: perhaps out of memory, lower replay.capacity" in said, said
    assert f"its last checkpoint is {saved.path.name}: qfleet resume runs/x" in said
    short = [f"total_steps={saved.manifest.step + 400}", "eval.episodes=200", "fleet.actor_restarts=3"]
    with FleetRun("resume", "x", *short, cwd=tmp_path) as fleet:
        fleet.until(lambda: (pulse := fleet.pulse()) and pulse.steps >= saved.manifest.step + 400)
        fleet.kill("evaluator", signal.SIGKILL)
        code, result = fleet.ended()
        fleet.assert_gone()
        assert code == 0 and result["best"] is not None, fleet.complaints
        assert_goes_forward(fleet.run)
    again = qfleet("resume", "x", cwd=tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stdout
