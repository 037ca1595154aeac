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
# How many processes share the tests, 0 being this one alone. Three for two cores: tests wait for processes to start, and for
# deadlines, a fifth of the time.
TEST_WORKERS ?= 3
# How long `make soak` goes on.
SOAK_SECONDS ?= 600
# How many requests `make fuzz` makes up, and which.
FUZZ_CASES ?= 20000
FUZZ_SEED ?= 1
# How long `make chaos` goes on, and where its report goes.
CHAOS_MINUTES ?= 30
CHAOS_REPORT ?= build/chaos.md
# Flags for `make chaos`, such as CHAOS_FLAGS="--seed 7".
CHAOS_FLAGS ?=
# Flags for `make soak`, such as SOAK_FLAGS="--seed 7", or "--replay FILE" with the history that a failure printed.
SOAK_FLAGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install model clients chart lock run test soak chaos chaos-rolling fuzz interop interop-record check format bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

NPM_PARTS := tests/clients tests/deploy/crds tests/page

clients: $(NPM_PARTS:%=%/node_modules/.installed) ## Install what tests need of npm, where there is npm

%/node_modules/.installed: %/package-lock.json
	@if command -v npm >/dev/null; then \
	  cd $* && npm ci --no-audit --no-fund --loglevel=error && touch node_modules/.installed; \
	else echo "no npm here: tests that need $* will be skipped"; fi

chart: install ## Write what is made of the code (the chart's schema, README, dashboards and Kustomize base; docs/metrics.md)
	@$(BIN)/python -m deploy.generate
	$(BIN)/pytest -q tests/deploy/test_renders.py tests/deploy/test_generated.py

lock: install ## Write the exact versions and hashes that images are made of
	@test -x build/uv/bin/uv || { $(PYTHON) -m venv build/uv && build/uv/bin/pip install --quiet 'uv>=0.13,<0.14'; }
	$(BIN)/python -m deploy.lock build/uv/bin/uv

run: install model ## Start everything with the small model, until Ctrl-C
	@$(BIN)/backhaul up $(UP_FLAGS)

# Of the hundreds of processes that tests start, one compiles what the others load.
test: install model clients ## Run all tests
	PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(PYTEST_FLAGS)

soak: install ## Ask random histories of real engines for SOAK_SECONDS (600): every answer must be a cold engine's
	@$(BIN)/python -m tests.property.soak --seconds $(SOAK_SECONDS) $(SOAK_FLAGS)

chaos: install ## Break parts of a deployment under load at random for CHAOS_MINUTES (30), and report what it cost
	@$(BIN)/python -m tests.chaos --minutes $(CHAOS_MINUTES) --report $(CHAOS_REPORT) $(CHAOS_FLAGS)

chaos-rolling: install ## Restart every engine and router under load behind haproxy: no request may fail
	@$(BIN)/python -m tests.chaos.rolling

fuzz: install ## Send FUZZ_CASES (20000) broken requests to engines and router: nothing may break (other FUZZ_SEEDs, others)
	FUZZ_CASES=$(FUZZ_CASES) FUZZ_SEED=$(FUZZ_SEED) $(BIN)/pytest tests/fuzz

interop: install model ## Run the router over real vLLM engines (once 3.5 GB into the user's cache; wants 9 GiB of memory)
	$(BIN)/pytest tests/interop $(PYTEST_FLAGS)

interop-record: install model ## Record anew what real vLLM engines say, for the tests that do without them
	$(BIN)/python -m tests.interop.record

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
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.router

clean: ## Remove the virtual environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
