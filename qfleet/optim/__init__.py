"""Flat parameter vectors, the optimizers that step them, and learning rates."""
