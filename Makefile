# `make setup`, `make test`, `make demo`, `make check`: each does what it needs first, on a machine with Python 3.11 or later.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test test-all demo check

help:
	@echo "make setup   a virtual environment in $(VENV) with EPL and all that its tests and examples need"
	@echo "make test    the tests, but for those marked slow"
	@echo "make test-all  all tests: more kinds of failures, random kills, more models in float32"
	@echo "make demo    the main job: one model trained under several strategies, and how their curves compare"
	@echo "make check   format, lint, types and tests: what a change must pass"

setup: $(STAMP)

# Runs again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt -e ".[test,examples,dev]"
	touch $@

# Two processes: while the ranks of one test wait for each other, another test computes.
test: setup
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

test-all: setup
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

demo: setup
	bash scripts/demo

check: setup
	scripts/check
