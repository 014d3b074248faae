PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench-forms bench-fold clean

demo: .venv/installed
	$(BIN)/repaconv demo --arch s12

test: .venv/installed-dev lint
	$(BIN)/pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-forms: .venv/installed
	$(BIN)/python benchmarks/riformer_forms.py -o benchmarks/results/riformer_forms_s12.json

bench-fold: .venv/installed
	$(BIN)/python benchmarks/fold_large.py -o benchmarks/results/fold_large.json

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv demo-out
