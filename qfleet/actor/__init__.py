"""Actors: policy, recorder, and the loop that steps environments."""
