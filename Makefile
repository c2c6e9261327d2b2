# Needs Python >= 3.11, make, and a network with PyPI; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two processes for the tests: each imports torch, and the machines this runs on may be small.
WORKERS ?= 2

.PHONY: quickstart test test-all lint format bench clean

quickstart: $(INSTALLED)
	$(BIN)/volseg quickstart

test: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

test-all: lint
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not gpu and not multi_gpu"

lint: $(INSTALLED)
	$(BIN)/ruff format --check volseg tests workflows
	$(BIN)/ruff check volseg tests workflows
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell volseg workflows docs configs datasets *.md

format: $(INSTALLED)
	$(BIN)/ruff format volseg tests workflows
	$(BIN)/ruff check --fix volseg tests workflows

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "volseg needs Python >= 3.11, this is " + sys.version)'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
