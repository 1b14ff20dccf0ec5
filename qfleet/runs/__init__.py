"""Files of a run: directory, checkpoints, records, locks."""
