"""Which texts of a config may name code that a foreign run would import."""

from operator import attrgetter

import pytest

from qfleet.runconfig.resolution import resolve
from qfleet.runs.find import TRAINING_ONLY, acting_part, foreign_names


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


def test_what_acting_imports_is_all_but_the_keys_of_training():
    config = {"callbacks": ["mine:C"], "sync": "mine:S", "env": {"id": "mine:E"}, "replay": {"store": "mine:R"},
              "learner": {"schedule": "mine:L"}, "agent": {"torso": "mine:T"}}
    assert foreign_names(acting_part(config)) == ["mine:E", "mine:T"] and len(foreign_names(config)) == 6
    attrgetter(*TRAINING_ONLY)(resolve("cartpole").config)  # raises for a key that does not exist
