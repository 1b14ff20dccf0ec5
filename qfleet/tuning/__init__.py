"""Studies: hyperparameter search with Optuna. Every trial is a run in a process of its own."""
