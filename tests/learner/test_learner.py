"""The learner: order of calls, weighting in one place, targets, publishing, bad batches, resume."""

import numpy as np
import pytest
import torch
from fakes import ListMetrics, TapeReplay, linear_agent, sample_of

from qfleet.core.agent import Loss
from qfleet.learner.learner import Diverged, Learner, LearnerConfig, LearnerContext
from qfleet.learner.weight_store import Mailbox
from qfleet.maths.outliers import LossStatistics, inlier_mask
from qfleet.sync.gradient_sync import Solo


def learner_with(samples, agent=None, context=None, **cfg):
    """A learner on a replay with these samples; `context` holds arguments of its `LearnerContext`."""
    defaults = {"batch_size": 2, "precision": "fp32", "learning_rate": 0.1, "metrics_period_updates": 1}
    replay, metrics, weights = TapeReplay(samples=samples), ListMetrics(), Mailbox()
    learner = Learner(agent or linear_agent(), replay, weights, metrics, LearnerConfig(**(defaults | cfg)), 0,
                      torch.device("cpu"), LearnerContext(**(context or {})))
    return learner, replay, metrics, weights


def test_all_due_updates_are_made_and_priorities_go_back_with_their_keys():
    learner, replay, _, weights = learner_with([sample_of([1, 2], keys=np.array([7, 9])), sample_of([3, 4])])
    assert learner.step()
    assert replay.tape == ["sample", "update", "sample", "update", "sample"]
    assert replay.updates[0][0] == [7, 9]
    assert learner.updates == 2
    assert weights.fetch(-1)[0] == 2


def test_nothing_due_is_not_busy_but_the_first_weights_are_published():
    learner, _, _, weights = learner_with([])
    assert not learner.step()
    assert weights.fetch(-1)[0] == 0


def test_importance_weights_scale_the_gradient_of_their_item():
    weighted, _, _, _ = learner_with([sample_of([1, 2], weight=torch.tensor([0.5, 0.25]))], clip_norm=0)
    plain, _, _, _ = learner_with([sample_of([0.5, 0.5])], clip_norm=0)
    weighted.step()
    plain.step()
    assert torch.equal(weighted.flat.grad, plain.flat.grad)


def test_extra_is_added_to_the_mean():
    def loss(net, target, batch, rng):
        return Loss(torch.zeros(2), torch.ones(2), extra=net.weight.sum() * 3)

    learner, _, _, _ = learner_with([sample_of([1, 2])], agent=linear_agent(loss), clip_norm=0)
    learner.step()
    assert learner.flat.grad.tolist() == [3.0, 3.0, 3.0]


def test_hard_target_follows_every_period():
    learner, _, _, _ = learner_with([sample_of([1, 2]) for _ in range(3)], target_period_updates=2)
    start = learner.target.master.clone()
    online = []
    for _ in range(3):
        sample = learner.replay.samples.pop(0)
        learner._update(sample)
        online.append(learner.flat.master.clone())
    assert torch.equal(learner.target.master, online[1])
    assert not torch.equal(learner.target.master, start)


def test_soft_target_moves_every_update():
    learner, _, _, _ = learner_with([sample_of([1, 2])], target_period_updates=0, target_tau=0.5)
    start = learner.target.master.clone()
    learner.step()
    assert torch.allclose(learner.target.master, (start + learner.flat.master) / 2)


class Shared(Solo):
    """Each update of this learner counts as several of the run."""

    each = 3

    def update_count(self, before, made):
        return before + made * self.each


def test_updates_of_others_count_for_the_target_and_for_measurements():
    """Between two updates of this learner others make two: the clock goes 3, 6, 9."""
    batches = [sample_of([1, 2]) for _ in range(3)]
    sync = Shared(LearnerConfig(learning_rate=0.1))
    hard, _, metrics, _ = learner_with(list(batches), context={"gradient_sync": sync}, target_period_updates=4,
                                       metrics_period_updates=4)
    online = []
    for sample in batches:
        hard._update(sample)
        online.append(hard.flat.master.clone())
        if hard.updates == 6:
            assert torch.equal(hard.target.master, online[1]), "4 has been passed"
    assert hard.updates == 9 and torch.equal(hard.target.master, online[2])
    assert sum("train/loss" in values for values in metrics.values) == 2
    sync = Shared(LearnerConfig(learning_rate=0.1))
    soft, _, _, _ = learner_with(list(batches), context={"gradient_sync": sync}, target_period_updates=0,
                                 target_tau=0.5)
    start = soft.target.master.clone()
    soft._update(batches[0])
    assert torch.allclose(soft.target.master, start + (1 - 0.5**3) * (soft.flat.master - start))
    sync.each = 0
    before = soft.target.master.clone()
    soft._update(batches[1])
    assert torch.equal(soft.target.master, before), "a gradient that was dropped is no update"


def test_losses_beyond_belief_are_left_out_and_counted():
    def loss(net, target, batch, rng):
        return Loss(net.weight.sum() * batch.rows["reward"][:, 0], torch.ones(2))

    usual, wild = [sample_of([1, 1.5]) for _ in range(10)], sample_of([1, 50])
    doubting, _, metrics, _ = learner_with([], linear_agent(loss), {"outlier_deviations": 6.0}, clip_norm=0,
                                           learning_rate=1e-9)
    torch.nn.init.constant_(doubting.flat.net.weight, 1.0)
    for sample in usual:
        doubting._update(sample)
    believing = doubting.flat.grad.clone()
    doubting._update(wild)
    assert torch.allclose(doubting.flat.grad, believing * 1 / 2.5), "of 1 and 50, 1 alone counts"
    assert metrics.counts["server/outliers"] == 1
    unit = float(doubting.flat.net.weight.detach().sum())
    _, spread = inlier_mask(unit * torch.tensor([1.0, 50.0]), LossStatistics(1.25 * unit, (0.25 * unit) ** 2, 10), 6.0)
    assert float(doubting._outlier_filter.bound) == pytest.approx(spread.mean + 6 * spread.variance ** 0.5, rel=1e-4)
    assert float(doubting._outlier_filter.bound) < 6 * unit, "the wild one has not moved it far"
    doubting._update(usual[0])
    assert torch.allclose(doubting.flat.grad, believing)


def test_publishing_waits_for_its_period():
    learner, _, _, weights = learner_with([sample_of([1, 2])], publish_period_updates=3)
    learner.step()
    assert weights.fetch(-1)[0] == 1  # the first weights at once
    learner.replay.samples = [sample_of([1, 2])] * 2
    learner.step()
    assert weights.fetch(-1)[0] == 1
    learner.replay.samples = [sample_of([1, 2])]
    learner.step()
    assert weights.fetch(-1)[0] == 4


@pytest.mark.parametrize("burst", [1, 2, 4, 7])
def test_with_the_period_of_the_target_actors_have_the_targets_weights(burst):
    """However many updates are made at a time, and whatever moment readers ask at; also after a resume."""
    cfg = {"target_period_updates": 5, "publish_period_updates": 5}
    learner, _, _, weights = learner_with([], **cfg)
    learner.publish()
    seen = set()
    for turn in range(12):
        learner.replay.samples = [sample_of([turn + 1.0, 2 - i]) for i in range(burst)]
        learner.step()
        version, state = weights.fetch(-1)
        seen.add(version)
        assert all(torch.equal(state[name], value) for name, value in learner.target.state().items())
        if turn == 6:
            again, _, _, others = learner_with([], **cfg)
            again.load_state_dict(learner.state_dict())
            others.load_state_dict(weights.state_dict())
            learner, weights = again, others
    assert seen == set(range(0, 12 * burst + 1, 5)) or (burst > 5 and len(seen) > 8)


def test_readers_that_were_away_get_the_targets_weights_too():
    learner, *_ = learner_with([sample_of([1, 2])] * 5, target_period_updates=2, publish_period_updates=2)
    learner.weights = Slow()
    learner.step()
    assert learner.updates == 5 and learner.weights.given == []
    learner.weights.has_reader = True
    learner.step()
    (version, state), = learner.weights.given
    assert version == 4
    assert all(torch.equal(state[name], value) for name, value in learner.target.state().items())


class Slow:
    """A mailbox whose readers have not taken what is there yet."""

    def __init__(self):
        self.has_reader, self.given = False, []

    def publish(self, state, version):
        self.given.append((version, state))


def test_published_weights_do_not_change_afterwards():
    learner, _, _, weights = learner_with([sample_of([1, 2])])
    learner.step()
    before = weights.fetch(-1)[1]["weight"].clone()
    learner.flat.master.fill_(9)
    assert torch.equal(weights.fetch(-1)[1]["weight"], before)


def test_the_limit_of_updates_is_exact():
    learner, _, _, _ = learner_with([sample_of([1, 2]) for _ in range(5)], context={"max_updates": 3})
    learner.step()
    assert learner.updates == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_moves_nothing_and_is_handed_over(bad):
    seen = []
    learner, replay, metrics, _ = learner_with([sample_of([1, bad])],
                                             context={"on_bad": lambda s, u: seen.append((s, u))})
    before = learner.flat.master.clone()
    learner.step()
    assert torch.equal(learner.flat.master, before)
    assert replay.updates == [] and learner.updates == 0
    assert metrics.counts == {"fault/bad_updates": 1}
    assert len(seen) == 1 and seen[0][1] == 0


def test_bad_batches_in_a_row_end_the_run_by_name():
    learner, _, _, _ = learner_with([sample_of([1, float("nan")]) for _ in range(9)], max_bad_updates=3)
    with pytest.raises(Diverged, match="3 updates in a row"):
        learner.step()


def test_weights_that_overflow_in_a_step_are_neither_published_nor_saved():
    """Loss and gradient are finite, and the step is not."""
    learner, _, metrics, weights = learner_with([sample_of([1, 2])], optimizer="rmsprop", learning_rate=1e38)
    with pytest.raises(Diverged, match=r"weights are not finite after 1 update;.*learner\.learning_rate"):
        learner.step()
    assert not metrics.counts and learner.updates == 1 and not torch.isfinite(learner.flat.master).all()
    assert weights.fetch(-1) is None
    with pytest.raises(Diverged, match="weights are not finite"):
        learner.state_dict()


def test_good_batches_between_bad_ones_clear_the_count():
    bad, good = sample_of([1, float("nan")]), sample_of([1, 2])
    learner, _, metrics, _ = learner_with([bad, good, bad, good, bad, good], max_bad_updates=2)
    learner.step()
    assert learner.updates == 3 and metrics.counts["fault/bad_updates"] == 3


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_equals_no_interruption(optimizer, precision):
    batches = [sample_of([i + 1.0, i - 2.0]) for i in range(6)]
    cfg = {"optimizer": optimizer, "precision": precision, "target_period_updates": 2}
    whole, _, _, _ = learner_with(list(batches), **cfg)
    whole.step()
    first, _, _, _ = learner_with(batches[:3], **cfg)
    first.step()
    second, _, _, _ = learner_with(batches[3:], **cfg)
    second.load_state_dict(first.state_dict())
    second.step()
    assert torch.equal(whole.flat.master, second.flat.master)
    assert torch.equal(whole.target.master, second.target.master)
    assert second.updates == 6
