"""Training of one learner process: main loop, stop rule, evaluation, checkpoints and metrics."""
