"""Files of a run: directory, checkpoints, metric records and locks."""
