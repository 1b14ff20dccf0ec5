"""A run in the calling program leaves torch's settings of that program alone, and has its own."""

import torch

from qfleet.interface.local_attempt import TorchState


def test_the_generator_of_a_run_continues_where_it_stopped():
    state = TorchState(1)
    with state.active():
        torch.manual_seed(1)
        first = torch.rand(2)
    torch.rand(7)  # the caller's
    with state.active(keep=False):
        torch.rand(5)  # looking
    with state.active():
        second = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([first, second]), torch.rand(4))


def test_the_caller_keeps_its_generator_and_threads():
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    state = TorchState(threads + 1)
    with state.active():
        assert torch.get_num_threads() == threads + 1
        torch.rand(3)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), generator)
