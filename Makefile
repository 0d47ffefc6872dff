# Two commands: `make quickstart` (PPO on a real language model) and `make test`. Each creates .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
STARTED := $(shell date +%s)
BIN := $(VENV)/bin

.PHONY: help install quickstart test test-all test-nodes check bench clean
help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.installed: constraints.txt setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "realrl needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install -q --disable-pip-version-check setuptools wheel
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev,viz,parquet,quickstart]'
	@touch $@

install: $(VENV)/.installed   ## create .venv with the pinned set

quickstart: install   ## fetch a real model and human ratings, train a reward model, run PPO, print what changed
	$(BIN)/python scripts/quickstart.py --since $(STARTED)

$(VENV)/.references: $(VENV)/.installed
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[trl]' && touch $@ || echo "TRL cannot be installed here: the tests that compare losses with it are skipped"

$(VENV)/.backends: $(VENV)/.installed
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[megatron,deepspeed]' && touch $@ || echo "megatron-core or DeepSpeed cannot be installed here: the tests of these backends are skipped"

$(VENV)/.ray: $(VENV)/.installed
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[ray]' && touch $@ || echo "Ray cannot be installed here: its tests are skipped"

test: install $(VENV)/.references $(VENV)/.backends   ## the tests, under 10 minutes on two cores
	scripts/test

test-all: install $(VENV)/.references $(VENV)/.backends   ## the tests and the heavier sweeps
	scripts/test -m 'not gpu and not netns'

test-nodes: install $(VENV)/.ray   ## runs over several machines, which are network namespaces: needs root, ip, nft, unshare and nsenter
	@which ip nft nsenter pgrep >/dev/null || { apt-get update -q && apt-get install -yq iproute2 nftables util-linux procps; }
	@which slurmctld mpirun >/dev/null || { apt-get update -q; apt-get install -yq --no-install-recommends slurm-wlm openmpi-bin || echo "SLURM or Open MPI cannot be installed here: their tests are skipped"; }
	scripts/test -n 0 -m netns tests/e2e

check: install   ## format, lint, types, layers, sizes
	scripts/check

clean:   ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
