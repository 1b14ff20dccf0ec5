"""Evaluation: a fixed number of full episodes per lane, fixed weights, schedules."""

import pytest
import torch
from fakes import TapeEnv, linear_agent

from qfleet.actor.policy import Policy
from qfleet.core.clock import Progress, Schedule
from qfleet.core.errors import EnvFault
from qfleet.learner.weight_store import Mailbox
from qfleet.training.evaluation import EpisodeCounter, EvalConfig, Evaluator, EvaluatorHooks, evaluate


def test_short_episodes_are_not_favoured():
    policy = Policy(linear_agent(), 0, torch.device("cpu"))
    score = evaluate(policy, TapeEnv([2, 10]), episodes=4, epsilon=0.0, seed=1)
    assert sorted(score.lengths) == [2, 2, 10, 10]
    assert score.mean == pytest.approx(60.0)


def test_the_first_lanes_play_the_remainder_of_an_uneven_number_of_episodes():
    assert EpisodeCounter(5, 3).quota == [2, 2, 1]
    assert EpisodeCounter(2, 4).quota == [1, 1, 0, 0]
    policy = Policy(linear_agent(), 0, torch.device("cpu"))
    assert len(evaluate(policy, TapeEnv([2, 3, 4]), 5, 0.0, 1).returns) == 5


class AbortingEnv(TapeEnv):
    """Aborts the episodes of all lanes at every `at`-th step."""

    def __init__(self, lengths, at):
        super().__init__(lengths)
        self.at, self.count = at, 0

    def recv(self):
        self.count += 1
        self.cut_next[:] = self.count % self.at == 0
        return super().recv()


def test_an_environment_that_aborts_every_episode_ends_the_evaluation():
    policy, env = Policy(linear_agent(), 0, torch.device("cpu")), AbortingEnv([5, 5], at=3)
    with pytest.raises(EnvFault, match="tape lost 20 episodes of an evaluation"):
        evaluate(policy, env, 2, 0.0, 1)
    assert env.count == 30


def test_aborted_episodes_are_counted_since_the_last_completed_one():
    policy, env = Policy(linear_agent(), 0, torch.device("cpu")), AbortingEnv([2, 2], at=4)
    assert evaluate(policy, env, 100, 0.0, 1).lengths == [2] * 100
    assert env.faults() > 20
    assert evaluate(policy, env, 2, 0.0, 1).lengths == [2, 2], "aborts in earlier evaluations do not count"


def evaluator_with(weights, clock, seen, recent=(None,), **cfg):
    policy = Policy(linear_agent(), 0, torch.device("cpu"))
    hooks = EvaluatorHooks(lambda: clock[0], lambda score, state: seen.append((score, state)),
                           recent_return=lambda: recent[0])
    return Evaluator(policy, TapeEnv([3]), weights, EvalConfig(episodes=2, **cfg), 1, hooks)


def test_the_newest_weights_are_evaluated_once_per_period():
    weights, clock, seen = Mailbox(), [Progress(0, 0)], []
    evaluator = evaluator_with(weights, clock, seen, period_steps=10)
    assert not evaluator.step()
    weights.publish({"weight": torch.full((3, 1), 4.0)}, 5)
    clock[0] = Progress(10, 5)
    assert evaluator.step() and not evaluator.step()
    assert seen[0][0].version == 5 and (seen[0][1]["weight"] == 4).all()
    clock[0] = Progress(20, 5)
    assert evaluator.step() and len(seen) == 1, "the same weights are not evaluated twice"


def test_evaluations_wait_for_from_return_and_then_start_at_once():
    clock, seen, weights, recent = [Progress(0, 0)], [], Mailbox(), [None]
    weights.publish(Policy(linear_agent(), 0, torch.device("cpu")).flat.state(), 1)
    evaluator = evaluator_with(weights, clock, seen, recent, period_steps=10, from_return=0)
    for steps, score, evaluated in [(25, None, False), (26, -1.0, False), (27, 0.0, True), (28, 5.0, False)]:
        clock[0], recent[0] = Progress(steps, steps), score
        assert evaluator.step() == evaluated
    assert len(seen) == 1


def test_each_evaluation_has_its_own_seed_also_after_a_resume():
    weights, clock, seen = Mailbox(), [Progress(0, 0)], []
    evaluator = evaluator_with(weights, clock, seen, period_updates=1)
    for version in (1, 2):
        weights.publish({"weight": torch.zeros(3, 1)}, version)
        clock[0] = Progress(version, version)
        evaluator.step()
    first, second = evaluator.env.resets
    assert first != second
    resumed = evaluator_with(weights, clock, seen, period_updates=1)
    resumed.load_state_dict({"count": 1, "judged": 1})
    weights.publish({"weight": torch.zeros(3, 1)}, 3)
    clock[0] = Progress(3, 3)
    resumed.step()
    assert resumed.env.resets == [second]


def test_schedule_by_steps_by_updates_and_never():
    by_steps, by_updates, never = Schedule(10, None), Schedule(None, 3), Schedule(None, None)
    assert [n for n in (0, 9, 10, 11, 35, 39, 40) if by_steps.due(Progress(n, 0))] == [10, 35, 40]
    assert [by_updates.due(Progress(0, n)) for n in (2, 3, 4, 6)] == [False, True, False, True]
    assert not never.due(Progress(10**9, 10**9))
    by_steps.resume(Progress(45, 0))
    assert not by_steps.due(Progress(49, 0)) and by_steps.due(Progress(50, 0))


def test_episodes_that_do_not_end_are_scored_as_they_stand_and_the_warning_names_the_remedy(monkeypatch, caplog):
    monkeypatch.setattr("qfleet.training.evaluation.ENDLESS_STEPS", 50)
    policy = Policy(linear_agent(), 0, torch.device("cpu"))
    score = evaluate(policy, TapeEnv([10**9, 10**9]), 2, 0.0, 1)
    assert score.lengths == [50, 50] and score.returns == [500, 500]
    assert "set env.max_episode_steps" in caplog.text
    assert evaluate(policy, TapeEnv([49, 49]), 4, 0.0, 1).mean == 490
