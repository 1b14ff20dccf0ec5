"""Roles as Ray actors: who starts them, where, and how the messages of a fleet travel as Ray calls."""
