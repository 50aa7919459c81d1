# make train: install and train the default run.   make test: install and run all tests.   make check: lint and types too.
# ARGS="..." goes to the command: make train ARGS="parallel=tp2_pp2 trainer.steps=50"; make test ARGS="tests/config -x"
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q

.PHONY: train test check lint types help clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,2s/^# //p' Makefile

# The default layout wants 4 ranks: 4 GPUs, or none (then ranks share the CPU). With 1 to 3 GPUs take a layout that fits.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
LAYOUT := $(if $(findstring parallel=,$(ARGS)),,$(if $(filter 1,$(GPUS)),parallel=single,$(if $(filter 2 3,$(GPUS)),parallel=tp2)))

train: $(VENV)/.installed
	$(BIN)/python -m gpt3d.train $(LAYOUT) $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 $(ARGS)  # two tests at a time

check: lint types test

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

# torch first and alone: the constraint keeps every later step from replacing it by another build.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpt3d needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": use make PYTHON=python3.11")'
	@echo "Installing into $(VENV) from constraints.txt: torch, then DeepSpeed and the rest (a minute or two, once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing what the tests and checks need"
	$(PIP) -e .[test,check]
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
