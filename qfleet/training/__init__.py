"""The run of one learner: loop, stop rule, evaluation, checkpoints, metrics."""
