"""Which texts of a config may name code that a foreign run would import."""

import pytest

from qfleet.runs.find import foreign_names


@pytest.mark.parametrize(("config", "found"), [
    ({"learner": {"optimizer": "torch.optim:NAdam", "schedule": "linear"}}, []),
    ({"learner": {"optimizer": "torch.optim.nadam:NAdam"}, "env": {"id": "mine:Env"}}, ["mine:Env"]),
    ({"learner": {"optimizer": "torch.optim:NAdam", "schedule": "mine:steps"}}, ["mine:steps"]),
    ({"learner": {"optimizer": "torch.optim_mine:Lion"}}, ["torch.optim_mine:Lion"]),
    ({"learner": {"optimizer": "mine:Lion", "optimizer_options": {"rule": "a:b"}}}, ["mine:Lion", "a:b"]),
    ({"env": {"id": "torch.optim:NAdam"}}, ["torch.optim:NAdam"]),
    ({"learner": "torch.optim:NAdam", "device": "cuda:0"}, ["torch.optim:NAdam"]),
])
def test_optimizers_of_torch_are_not_foreign_code(config, found):
    assert foreign_names(config) == found
