"""Learner: gradients, optimizer, flat parameters, and publishing of weights."""
