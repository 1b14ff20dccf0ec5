"""Parts of the Python API: arguments, `Run`, `TrainedAgent`, evaluation on request."""
