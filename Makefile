# Artesian's everyday commands. Everything lands in one virtual environment, pinned by constraints.txt.
PYTHON ?= python3
VENV   ?= .venv
# What is installed: this checkout, editable. The Dockerfile says "." instead.
TARGET ?= -e .
ARGS   ?=

# The checkout's folders (server/, kernels/, ...) must not be importable as themselves.
export PYTHONSAFEPATH = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py) $(wildcard kernels/cpu/*.c kernels/cpu/*.h)
NODE    := tests/support/node
SDK     := clients/typescript

.DEFAULT_GOAL := help
.PHONY: help setup install model serve dev test test-long lint clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: install model  ## Create .venv, install, compile the kernels, download the default model

install: $(VENV)/.installed

model: install
	$(BIN)/artesian pull

serve: setup  ## Set up if need be, then serve the default model on port 8000
	$(BIN)/artesian serve $(ARGS)

dev: $(VENV)/.dev $(VENV)/instructor/.installed $(NODE)/node_modules $(SDK)/node_modules  ## Add what tests and linters need to .venv

test: dev  ## Run all tests
	$(BIN)/pytest $(ARGS)

test-long: dev  ## Run the long versions: crash loops, soak
	$(BIN)/pytest -m long $(ARGS)

lint: dev  ## Check style, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build *.egg-info $(NODE)/node_modules $(SDK)/node_modules $(SDK)/dist .pytest_cache .mypy_cache .ruff_cache
	rm -f kernels/cpu/*.so

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Artesian needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build runs in this environment, so that setuptools is the pinned one and is downloaded once.
$(VENV)/.installed: $(BIN)/python $(SOURCES)
	$(PIP) setuptools
	$(PIP) --no-build-isolation $(TARGET)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# A package that cannot share an environment with a current `openai`.
$(VENV)/instructor/.installed: tests/support/instructor.txt $(BIN)/python
	$(PYTHON) -m venv $(VENV)/instructor
	$(VENV)/instructor/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

# OpenAI's JavaScript SDK, for the test that speaks to us through it; the compiler of our own.
%/node_modules: %/package.json
	@if command -v npm > /dev/null; \
	then npm install --prefix $* --ignore-scripts --no-package-lock --no-audit --no-fund && touch $@; \
	else echo "no npm here: the tests of the JavaScript SDKs will be skipped"; fi
