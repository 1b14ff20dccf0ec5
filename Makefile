# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPLETE := $(VENV)/.complete
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 2

.PHONY: train test check goldens docs figures learn soak bench clean help

help:  ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip uninstall --yes -qq pygame  # of an older environment: pygame-ce has the same files
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[atari,mujoco,box2d,minigrid,minatar,ray,video,plot,dev]'
	touch $@

$(COMPLETE): $(READY)  # what only tests and the site need
	$(PIP) --constraint constraints.txt --editable '.[wandb,mlflow,hub,tune,onnx,docs]'
	touch $@

train: $(READY)  ## train CartPole, evaluate it, leave a curve, a video and a report
	$(BIN)/qfleet train cartpole --show
	@echo "(the qfleet and tensorboard commands above need this first: . $(BIN)/activate)"

test: $(COMPLETE)  ## all checks and all tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" --durations=40
	$(BIN)/python -m pytest -m alone --durations=10

check: $(COMPLETE)  ## the fast loop: ruff, mypy, unit tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

goldens: $(READY)  ## short trainings of this tree and of the commit in tests/goldens/BASE, compared bit by bit
	$(BIN)/python tests/goldens/goldens.py

docs: $(COMPLETE)  ## the documentation as a site, under build/site; a link that leads nowhere fails
	$(BIN)/python -m mkdocs build --strict --quiet

learn: $(READY)  ## the full learning matrix, k of n seeds; results under benchmarks/results
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/learn.py
	$(BIN)/python benchmarks/figures.py

figures: $(READY)  ## all numbers and pictures of README and docs, from benchmarks/results
	$(BIN)/python benchmarks/figures.py

soak: $(READY)  ## a learner killed 20 times, and five minutes of CartPole while processes are killed
	$(BIN)/python tests/system/fleet_soak.py --deaths 20 --seconds 300
	QFLEET_PARTITION_S=30 $(BIN)/python -m pytest tests/system/test_hosts.py -k cable
	$(BIN)/python tests/system/ray_soak.py --seconds 20
	$(BIN)/python tests/system/ray_soak.py --seconds 20 --learners

bench: $(READY)  ## speed and memory against peers, on a quiet machine; results under benchmarks/results
	$(PIP) stable-baselines3 tianshou cpprb
	for work in cartpole pong halfcheetah halfcheetah-ddpg acting updates; do \
	    $(BIN)/python benchmarks/bench.py $$work --out benchmarks/results/bench/$$work || exit 1; done
	$(BIN)/python benchmarks/bench.py cartpole pong halfcheetah --profile --out benchmarks/results/bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cost.py device=cpu
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/per.py --out benchmarks/results/per.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/replay_memory.py --out benchmarks/results/replay_memory.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/wire.py --out benchmarks/results/wire.json

clean:  ## remove the virtual environment and caches, never runs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
