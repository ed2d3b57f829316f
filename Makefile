# One command on a fresh machine: `make test` builds .venv, installs, checks and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install lint types test test-fast test-slow clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -m 'not slow'

test-slow: install
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
