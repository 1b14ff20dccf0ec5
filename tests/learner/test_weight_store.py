"""A mailbox keeps the newest weights, and of those that a GPU is still computing the newest that are complete."""

from types import SimpleNamespace

import pytest
import torch

from qfleet.learner import weight_store
from qfleet.learner.weight_store import MAX_PENDING, Mailbox


@pytest.fixture
def gpu(monkeypatch):
    """Updates that are done so far, of a GPU that computes later what it is told now."""
    done = [0]

    class Event:
        def record(self):
            self.after = told[-1]

        def query(self):
            return self.after <= done[0]

    told = [0]
    monkeypatch.setattr(weight_store.torch.cuda, "Event", Event)

    def publish(mailbox, version):
        told[0] = version
        mailbox.publish({"w": SimpleNamespace(device=torch.device("cuda"))}, version)

    return SimpleNamespace(done=done, publish=publish)


def versions(mailbox, newer_than=-1):
    found = (mailbox.fetch(newer_than), mailbox.completed.fetch(newer_than))
    return [None if news is None else news[0] for news in found]


def test_without_a_gpu_all_is_complete_at_once():
    mailbox = Mailbox()
    assert versions(mailbox) == [None, None]
    mailbox.publish({"w": torch.zeros(1)}, 3)
    assert versions(mailbox) == [3, 3] and versions(mailbox, 3) == [None, None]


def test_those_who_cannot_wait_get_the_newest_that_is_done(gpu):
    mailbox = Mailbox()
    for version in (0, 4, 8):
        gpu.publish(mailbox, version)
    gpu.done[0] = 3
    assert versions(mailbox) == [8, 0] and versions(mailbox, 0) == [8, None]
    gpu.done[0] = 8
    assert versions(mailbox, 0) == [8, 8]


def test_weights_come_through_however_far_the_host_is_ahead(gpu):
    """Always new ones before the last are done: the oldest wait their turn, the newest give way."""
    mailbox, seen = Mailbox(), -1
    for version in range(100):
        gpu.publish(mailbox, version)
        assert len(mailbox._pending) <= MAX_PENDING
        gpu.done[0] = version - 20
        seen = (mailbox.completed.fetch(seen) or (seen,))[0]
        assert version < 30 or version - 45 <= seen <= gpu.done[0]


def test_what_was_coming_is_forgotten_with_a_restored_state(gpu):
    mailbox = Mailbox()
    gpu.publish(mailbox, 7)
    mailbox.load_state_dict({"version": 5, "state": {}})
    gpu.done[0] = 100
    assert versions(mailbox) == [5, 5]
