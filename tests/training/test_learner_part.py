"""A learner's part of a checkpoint, as ranks send it to rank 0 and workers to the coordinator."""

from qfleet.training.learner_part import learner_part, learner_parts

STATE = {"actors": ["a"], "replay": {"size": 3}, "clock": {"steps": 8}, "evaluator": {"count": 1},
         "learner": {"rng": b"r", "target": {"w": 1}, "net": {"w": 2}}}


def test_a_part_has_what_is_the_learners_own_and_the_generator_of_its_updates():
    assert learner_part(STATE) == {"actors": ["a"], "replay": {"size": 3}, "clock": {"steps": 8},
                                   "learner": {"rng": b"r"}}


def test_a_part_has_further_keys_of_the_updates_as_far_as_they_exist():
    part = learner_part(STATE, ("rng", "target", "buffers"))
    assert part["learner"] == {"rng": b"r", "target": {"w": 1}}
    assert "learner" not in learner_part({"clock": {"steps": 0}}, ("rng",))


def test_the_part_of_a_part_is_the_same():
    """The coordinator reads the parts of workers with the function that wrote them."""
    part = learner_part(STATE, ("rng", "target"))
    assert learner_part(part, ("rng", "target")) == part


def test_the_first_part_of_a_checkpoint_is_its_state():
    other = learner_part(STATE)
    assert learner_parts({**STATE, "ranks": [other]}) == [{**STATE, "ranks": [other]}, other]
    assert learner_parts(STATE) == [STATE]
