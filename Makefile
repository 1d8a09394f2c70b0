# Needs Python 3.10 or newer (tested: 3.11) and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests that leave the cores to each other; real ranks, hosts and browsers want them alone.
TOGETHER := tests/autotune tests/dashboards tests/deploy

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench image clean

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,benchmarks]' --constraint constraints.txt
	@touch $@

demo: $(STAMP) ## Tune a real training of 4 processes on this machine, end to end
	$(BIN)/python examples/demo.py

test: lint ## Lint, types and the whole test suite (ARGS="-k name" to choose)
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@status=0; set -x; \
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(TOGETHER) || status=1; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(TOGETHER)) || status=1; \
	exit $$status
endif

lint: $(STAMP) ## Ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## List the benchmarks, or run one: make bench NAME=reducer ARGS=...
ifdef NAME
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)
else
	@for file in benchmarks/*.py; do \
		printf '%-12s %s\n' "$$(basename $$file .py)" "$$(sed -n '1s/"""//gp' $$file)"; done
endif

image: $(STAMP) ## Build the container image and tune a real training against it (ARGS=...)
	$(BIN)/python deploy/check_image.py $(ARGS)

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache
	rm -rf autotune/*.egg-info client/*.egg-info *.egg-info
