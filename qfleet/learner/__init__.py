"""Learner: samples, computes gradients, applies them, and publishes weights."""
