# Everything that a contributor runs. Only Python 3.11 and make are needed to start.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check docs slow gpu gpu-pending release bench fuzz mutants clean

demo: .venv/installed
	$(BIN)/marginlens demo

test: check
	$(BIN)/python -m pytest -n auto

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the documentation as a site: build/docs/html/index.html; a warning, such as a broken link, fails the build
docs: .venv/installed
	$(BIN)/python -m sphinx -b doctest -W --keep-going -n -q docs build/docs/doctest
	$(BIN)/python -m sphinx -b html -W --keep-going -n -q docs build/docs/html

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# on a machine with a CUDA GPU; results/gpu_checks.json says what passed, for which definitions
gpu: .venv/installed
	MARGINLENS_TEST_CUDA=1 MARGINLENS_GPU_RECORD=results/gpu_checks.json $(BIN)/python -m pytest -W default tests/gpu

# lists the GPU code that changed since: make gpu-pending WHY="what changed"
gpu-pending: .venv/installed
	$(BIN)/python -m tests.gpu.pending --why "$(WHY)"

# a release is built only if nothing waits for a GPU
release: .venv/installed
	$(BIN)/python -c 'from tests.gpu.sources import pending, summary; import sys; sys.exit(bool(pending()) and f"no release: {summary()}")'
	$(BIN)/pip install --quiet --constraint constraints.txt build
	$(BIN)/python -m build

bench: .venv/installed
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/views.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/page.py

fuzz: .venv/installed
	$(BIN)/python -m tests.fuzz

mutants: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt mutmut
	$(BIN)/mutmut run
	$(BIN)/mutmut results

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "marginlens needs Python 3.11 or newer: make PYTHON=python3.11 test")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf .venv mutants build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
