"""The env section: what has no effect is known, and suites are found by lying in the folder."""

import pytest
from pydantic import ValidationError

from qfleet.envs import EnvConfig, suite, suites


def test_suites_are_the_files_that_claim_and_the_generic_one_is_last():
    assert list(suites())[-1] == "gym" and {"atari", "toy"} < set(suites())
    assert "spaces" not in suites() and "check" not in suites()
    for id, name in [("ALE/Pong-v5", "atari"), ("toy/Catch-v0", "toy"), ("CartPole-v1", "gym"), ("my.mod:Env", "gym")]:
        assert suite(id) is suites()[name]


def test_atari_keys_are_inactive_elsewhere():
    inactive = EnvConfig(id="CartPole-v1").inactive()
    assert {"protocol", "frame_skip", "noop_max", "full_action_space", "sticky", "threads", "colour",
            "step_timeout_s"} == set(inactive)
    assert "not an Atari game" in inactive["sticky"]
    assert "colour" not in EnvConfig(id="CarRacing-v3", frame_size=64).inactive()


def test_inactive_keys_of_atari_and_isolation():
    inactive = EnvConfig(id="ALE/Pong-v5").inactive()
    assert set(inactive) == {"kwargs", "max_action_combinations", "on_nan", "info_metrics", "step_timeout_s",
                             "unlimited_episode_steps", "image_symbols"}
    assert "on_nan" not in EnvConfig(id="ALE/Pong-v5", wrappers=["a:b"]).inactive()
    assert "step_timeout_s" not in EnvConfig(id="ALE/Pong-v5", isolate=True).inactive()


@pytest.mark.parametrize("wrong", [
    {"id": ""}, {"id": "x", "lanes": 0}, {"id": "x", "protocol": "modern"}, {"id": "x", "sticky": 1.5},
    {"id": "x", "lane": 3},
    {"id": "x", "colour": "sepia"}, {"id": "x", "max_faults": 0}, {"id": "x", "step_timeout_s": 0}, {},
])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        EnvConfig(**wrong)


def test_every_field_is_documented():
    assert all(field.description for field in EnvConfig.model_fields.values())
