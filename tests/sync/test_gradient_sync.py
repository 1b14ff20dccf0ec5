"""The seam behind which learners meet: votes before updates, and an optimizer that works on slices."""

import math

import pytest
import torch
from fakes import sample_of
from test_learner import learner_with

from qfleet.optim.optimizer import Optimizer, OptimizerConfig, split_evenly
from qfleet.sync.gradient_sync import Solo


class Chorus(Solo):
    """A rule whose others answer from a list: False = somebody else has no batch yet."""

    def __init__(self, cfg, answers):
        super().__init__(cfg)
        self.answers, self.peaks, self.applied = answers, [], []

    def agree(self, max_weight):
        self.peaks.append(max_weight)
        ready = self.answers.pop(0)
        return 0.5 if ready and max_weight is not None else None

    def apply(self, grads):
        self.applied.append(grads)
        return super().apply(grads)


def with_chorus(samples, answers):
    chorus = Chorus(OptimizerConfig(learning_rate=0.1), answers)
    learner, replay, metrics, _ = learner_with(samples, context={"gradient_sync": chorus})
    return learner, replay, metrics


def test_a_batch_is_kept_while_others_have_none():
    learner, replay, _ = with_chorus([sample_of([1, 2]), sample_of([3, 4])], [False, False, True, True, True])
    assert not learner.step() and not learner.step()
    assert replay.tape == ["sample"], "one draw, held until all are ready"
    assert learner.step() and learner.updates == 2
    assert learner.gradient_sync.peaks == [1.0, 1.0, 1.0, 1.0, None], "a learner without a batch votes too"


def test_the_vote_scales_the_importance_weights():
    alone, _, _, _ = learner_with([sample_of([1, 2], weight=torch.tensor([0.5, 0.25]))], clip_norm=0)
    learner, _, _ = with_chorus([sample_of([1, 2])], [True, False])
    learner.step()
    alone.step()
    assert torch.allclose(learner.flat.grad, torch.full((3,), 0.75)) and torch.equal(alone.flat.grad.sign(),
                                                                                   learner.flat.grad.sign())


def test_a_loss_that_is_not_finite_is_told_to_the_others():
    learner, replay, metrics = with_chorus([sample_of([1, math.nan])], [True, False])
    before = learner.flat.master.clone()
    learner.step()
    assert learner.gradient_sync.applied == [None] and learner.updates == 0 and replay.updates == []
    assert torch.equal(learner.flat.master, before) and metrics.counts == {"fault/bad_updates": 1}


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
@pytest.mark.parametrize("size", [37, 1000])
@pytest.mark.parametrize("parts", [2, 3, 20])
def test_slices_move_as_the_whole_does(name, size, parts):
    cfg = OptimizerConfig(optimizer=name, learning_rate=0.1, clip_norm=1.0)
    torch.manual_seed(0)
    whole = torch.randn(size)
    sliced = whole.clone()
    one, cuts = Optimizer(cfg, whole), split_evenly(size, parts)
    assert len(cuts) == parts and [i for cut in cuts for i in range(size)[cut]] == list(range(size))
    many = [Optimizer(cfg, sliced[cut]) for cut in cuts]
    for _ in range(20):
        gradient = torch.randn(size)
        norm, copy = float(gradient.norm()), gradient.clone()
        for optimizer, cut in zip(many, cuts, strict=True):
            optimizer.step(copy[cut], norm)
        one.step(gradient, norm)
    assert torch.equal(whole, sliced)
