# Everything a newcomer or a contributor does, from a clean clone. Needs Python 3.11 or later.

VENV := .venv
BIN := $(VENV)/bin

# The first Python on the path that is new enough; `make PYTHON=/path/to/python train` chooses another.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$python"; break; fi; done)

.DEFAULT_GOAL := help
.PHONY: help train test test-long lint format clean

help:
	@echo "make train      train the small example on this machine (sets up $(VENV) first)"
	@echo "make test       linters, types and tests"
	@echo "make test-long  the tests that take minutes"
	@echo "make lint       linters and types only"
	@echo "make format     rewrite the code in its house style"
	@echo "make clean      remove $(VENV) and caches; runs/ stays"

train: $(VENV)/installed
	$(BIN)/koushi train examples/debug.yaml

test: lint
	$(BIN)/python -m pytest -m "not long"

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m long --durations=30

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $(VENV)/installed $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Koushi needs Python 3.11 or later, and there is none on the path as python3" \
		"or python3.11 to python3.14. Install one, or name it: make PYTHON=/path/to/python train" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
