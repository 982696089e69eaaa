# Every target works alone on a fresh clone: it makes .venv and installs pinned packages first.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-slow test-engine check docs bench clean

demo: .venv/.run-installed
	@$(BIN)/headrace run quickstart
	@echo 'To type `headrace` as it stands above: . $(BIN)/activate'

# Half of the time of a test goes by waiting for processes, so two files at a time.
test: .venv/.dev-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/.dev-installed
	$(BIN)/python -m pytest -m slow

test-engine: .venv/.dev-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "engine and not slow" tests/engine

check: .venv/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.dev-installed
	$(BIN)/python -m docs.generate

bench: .venv/.dev-installed
	$(BIN)/python -m tests.benchmarks

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.run-installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing Headrace into .venv (a few minutes, once)"
	@$(INSTALL) --editable .
	@touch $@

.venv/.dev-installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing Headrace and its development tools into .venv"
	@$(INSTALL) --editable '.[dev,gguf,provenance]'
	@touch $@ .venv/.run-installed

clean:
	rm -rf .venv build dist *.egg-info
