"""Starts the processes of a run and supervises them."""
