# What a developer types. `make help` lists it.

PYTHON ?= python3
VENV ?= .venv
# Where your package index has only CUDA builds of torch (several GB), give the index of the CPU builds here:
# the "CPU" URL that PyTorch's installation page shows for pip. Empty where the plain index has a CPU build.
TORCH_INDEX ?=
# Flags for `make run`, such as UP_FLAGS="--port 0 --decode 2".
UP_FLAGS ?=
# Flags for `make test`, such as PYTEST_FLAGS="tests/unit -x".
PYTEST_FLAGS ?=
# How long `make soak` goes on.
SOAK_SECONDS ?= 600
# Flags for `make soak`, such as SOAK_FLAGS="--seed 7", or "--replay FILE" with the history that a failure printed.
SOAK_FLAGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install model run test soak check format bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make the virtual environment with everything in it

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Backhaul needs Python 3.11 or newer: make install PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "This Python cannot make virtual environments: install its venv module (on Debian: python3-venv)"; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[dev]'
	@touch $@

model: install ## Fetch the small default model (93 MB, once)
	@$(BIN)/python -m backhaul.models

run: install model ## Start everything with the small model, until Ctrl-C
	@$(BIN)/backhaul up $(UP_FLAGS)

test: install model ## Run all tests
	$(BIN)/pytest $(PYTEST_FLAGS)

soak: install ## Ask random histories of real engines for SOAK_SECONDS (600): every answer must be a cold engine's
	@$(BIN)/python -m tests.property.soak --seconds $(SOAK_SECONDS) $(SOAK_FLAGS)

check: install ## Formatting, lint, types, and a report of file sizes
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(BIN)/python scripts/sizes.py

format: install ## Format the code and repair what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install model ## Measure engine and turns on this machine (a quiet one, please)
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.turn
	$(BIN)/python -m bench.turn --prefill 2 --decode 2 --turns 5 --history 1000
	$(BIN)/python -m bench.hostages
	$(BIN)/python -m bench.idle

clean: ## Remove the virtual environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
