# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Tests mostly wait, for servers and for processes: two at a time, a file's always in one.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
export PYTHONUNBUFFERED := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup quickstart test test-all lint bench lock docs
.DEFAULT_GOAL := help

help:
	@echo "make quickstart | test | test-all | lint | bench | setup | docs | lock"

setup: .venv/.complete

.venv/.complete: requirements.lock pyproject.toml .ci/setup
	@PYTHON=$(PYTHON) .ci/setup

# The run's JSON result is the last line of its output.
quickstart: setup
	@$(BIN)/loopwright quickstart

test: setup
	@$(PYTEST)

test-all: setup lint
	@$(PYTEST) -m "slow or not slow"

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/python -m flows.docs --check

docs: setup
	@$(BIN)/python -m flows.docs

bench: setup
	@$(BIN)/python -m benchmarks

lock:
	@PYTHON=$(PYTHON) .ci/lock
