"""Hyperparameter search with Optuna: eight trials on CartPole, of which the pruner stops those that lag behind.

    python tune.py [--trials 8] [--jobs 2] [key=value ...]

The space is a function of an Optuna trial; a mapping such as {"learner.learning_rate": "1e-4..1e-2:log"} is shorter,
but cannot make one choice depend on another. Continue an interrupted study with study=DIR, resume=True, space=space.
"""

import argparse

import qfleet


def space(trial):
    """Settings of a trial: keys of the config, flat or nested."""
    soft = trial.suggest_categorical("soft updates of the target", [True, False])
    target = ({"target_period_updates": 0, "target_tau": trial.suggest_float("tau", 1e-3, 0.1, log=True)} if soft else
              {"target_period_updates": trial.suggest_int("period", 50, 1000, log=True)})
    return {"learner": {"learning_rate": trial.suggest_float("learning rate", 1e-4, 1e-2, log=True), **target},
            "agent.n_step": trial.suggest_int("n-step", 1, 5)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    args, overrides = parser.parse_known_args()
    result = qfleet.tune("CartPole-v1", ["total_steps=10_000", *overrides], space=space, trials=args.trials,
                         jobs=args.jobs, pruner="median", progress=True)
    for trial in result.trials:
        print(trial.number, trial.state, trial.score, trial.settings)
    if result.best is not None:
        print(f"best score {result.best.score:.1f}; train it with `qfleet train {result.best_recipe}`")


if __name__ == "__main__":
    main()
