"""Gradient synchronisation: none, allreduce, parameter server."""
