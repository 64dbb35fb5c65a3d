# `make train` and `make test` do everything on a fresh machine: environment, install, job.
VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= cpu,jax,dev
BIN := $(VENV)/bin

.PHONY: install train test test-all lint format options benchmark clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

train: install  ## train the default model on the embedded digits
	$(BIN)/modelyard train-and-evaluate

# What is promised of every engine, once more on JAX: Keras has one backend for a process.
ON_JAX := tests/engine tests/loop/test_kill.py tests/models/test_schedules.py tests/data/test_draws_and_augment.py \
	tests/data/test_crop_box.py tests/loop/test_pause.py::test_a_pause_between_evaluations_adds_one_and_changes_nothing_else
# Several processes: what they learn, and what becomes of those that are killed.
CLUSTER := tests/distributed/test_cluster.py tests/distributed/test_cluster_kill.py tests/distributed/test_cluster_shards.py
CLUSTER_QUICK := tests/distributed/test_cluster.py::test_one_two_and_four_workers_learn_the_same

test: install  ## the tests, without the slow ones, on all cores
	$(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal
	$(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal --engine jax $(ON_JAX) $(CLUSTER_QUICK)

test-all: install  ## all tests
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/python -m pytest -n auto --dist worksteal --engine jax $(ON_JAX) $(CLUSTER) tests/loop/test_runs.py \
		tests/loop/test_kill_streaming.py tests/models tests/serving tests/data/test_augmentations.py

options: install  ## write docs/options.md
	$(BIN)/python -m modelyard.cli.option_page > docs/options.md

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## let ruff put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: install  ## ratios against peers, in one run: the loop against Keras's fit, the input against others
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/input.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
