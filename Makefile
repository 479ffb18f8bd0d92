# `make train` and `make test` set up what they need; nothing is installed twice.

PYTHON := .venv/bin/python
STAMP := .venv/installed
# Modules are linked into .venv one by one, so a new one is a reason to install again.
MODULES := $(shell find agents launch -name '*.py' | sort)

.PHONY: train test setup clean

train: setup
	.venv/bin/headrace train --agent impala --env CartPole-v1 --actors 2 --preset cartpole

test: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q --durations=10

setup:
	@./setup.sh "$(MODULES)"

clean:
	rm -rf .venv build headrace.egg-info
