# Needs Python 3.11 or newer, for the versions that are pinned, and make; all else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
# Several processes, one file at a time each.
TOGETHER := --dist loadfile --no-loadscope-reorder --numprocesses
PYTEST := $(BIN)/python -m pytest --durations 15

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-deepspeed test-all upstream-ddp upstream-fsdp upstream upstream-optimizers test-torch fuzz lint format docs bench image clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

# The demo needs a small part of what the other targets need. PyTorch's usual build brings 4.5 GB of
# CUDA's libraries; TORCH_INDEX is where another build of it comes from, but not what that needs.
$(DEMO): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): 1.2 GB with PyTorch's CPU build, 5.8 GB with CUDA's; mostly one to three minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),$(BIN)/python -m pip install --quiet torch --extra-index-url $(TORCH_INDEX) --constraint constraints.txt)
	@$(BIN)/python -m pip install --quiet --editable '.[service,examples]' --constraint constraints.txt
	@touch $@

$(STAMP): $(DEMO)
	@echo "Installing what the tests need: another 0.9 GB, one to two minutes; after this no test reaches a network"
	@$(BIN)/python -m pip install --quiet --editable '.[dev,benchmarks]' --constraint constraints.txt
	@$(BIN)/python -m tests.outside
	@touch $@

demo: $(DEMO) ## Tune a real training on two emulated hosts of this machine, end to end
	$(BIN)/python -m examples.demo

test: $(STAMP) ## Lint, types and the tests of what protects users (ARGS="-k name" to choose others)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
ifdef ARGS
	$(BIN)/mypy
	$(BIN)/python -m pytest $(ARGS)
else
	@status=0; set -x; \
	$(BIN)/mypy > $(VENV)/.types 2>&1 & \
	$(PYTEST) $(TOGETHER) 3 -m "not slow" || status=1; \
	wait $$! || status=1; cat $(VENV)/.types; \
	exit $$status
endif

# Whole jobs wait for a good part of their time: with two at a time a third of two cores is idle.
test-slow: $(STAMP) ## The tests that are marked slow: documents, frameworks, whole jobs with faults, hosts, browsers
	$(PYTEST) $(TOGETHER) 3 -m slow

test-all: $(STAMP) ## All tests: "make test", then the other parts; says how long each took
	@status=0; times=; \
	for part in test test-slow upstream-ddp; do \
		began=$$(date +%s); \
		$(MAKE) $$part || status=1; \
		times="$$times$$part $$(($$(date +%s) - began)) s\n"; \
	done; \
	printf "$$times"; exit $$status

upstream-ddp: $(STAMP) ## PyTorch's own DDP tests with torch's class, ours, and ours being re-cut
	$(BIN)/python tests/upstream/run.py --modes stock ours recut --world-sizes 2 3 $(ARGS)

upstream-fsdp: $(STAMP) ## PyTorch's own fully_shard tests with torch alone, and with models that we change
	$(BIN)/python tests/upstream_fsdp/run.py --world-sizes 2 4 $(ARGS)

# BSD; the release for the torch of constraints.txt. In a folder of its own, as Lightning and others
# would import it where it is installed.
TORCHVISION := $(CURDIR)/.cache/torchvision

upstream: $(STAMP) ## Bagua's own tests and examples, from its PyPI release, with bagua_compat
	[ -d $(TORCHVISION) ] || $(BIN)/python -m pip install --quiet --no-deps --target $(TORCHVISION) \
		torchvision==0.28.0 || echo "no torchvision, so some examples are skipped"
	PYTHONPATH=$(TORCHVISION) $(BIN)/python tests/upstream_bagua/run.py --devices 0 2 4 $(ARGS)

# Apache-2.0, 24 MB; without what it would bring besides, so that torch stays what it is. It compiles
# nothing. In a folder of its own, as Accelerate and others would import it where it is installed.
DEEPSPEED := $(CURDIR)/.cache/deepspeed

test-deepspeed: $(STAMP) ## DeepSpeed's ZeRO, tuned, beside itself untouched, also in Accelerate and the Trainer
	[ -d $(DEEPSPEED) ] || DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet \
		--no-deps --no-build-isolation --target $(DEEPSPEED) \
		deepspeed==0.19.8 einops hjson msgpack ninja py-cpuinfo
	PYTHONPATH=$(DEEPSPEED) $(PYTEST) $(TOGETHER) 2 $(or $(ARGS),tests/client/zero tests/integrations/scripts/test_deepspeed.py tests/benchmarks/test_zero.py)

# A CUDA build with its libraries, several GB: in an environment of its own, whose versions are pip's.
OPTIMIZERS = .cache/optimizers

upstream-optimizers: $(STAMP) ## Optimizers from PyPI, fused and plain
	[ -d $(OPTIMIZERS) ] || $(BIN)/python -m pip install --quiet --no-deps --target $(OPTIMIZERS) \
		pytorch_optimizer==4.1.0 torch_optimizer==0.3.0 pytorch_ranger==0.1.1
	PYTHONPATH=$(OPTIMIZERS):. $(BIN)/python tests/upstream/optimizers.py $(ARGS)

test-torch: ## The client's tests with another release of torch: make test-torch VERSION=2.15.0
	$(PYTHON) -m venv .venv-torch-$(VERSION)
	.venv-torch-$(VERSION)/bin/python -m pip install --quiet torch==$(VERSION) --editable '.[dev]'
	.venv-torch-$(VERSION)/bin/python -m tests.outside
	.venv-torch-$(VERSION)/bin/python -m pytest $(or $(ARGS),tests/client tests/training tests/compat)

fuzz: $(STAMP) ## Look for failures with new examples (SEED=n to repeat a run, ARGS="-k name")
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); \
	repeat="make fuzz SEED=$$seed repeats this run"; \
	echo "$$repeat"; \
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile fuzz --hypothesis-seed $$seed \
		$(ARGS) || { echo "$$repeat"; exit 1; }

lint: $(STAMP) ## Ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## Build the documentation's site into build/docs; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --builder html docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP) ## List the benchmarks, or run one: make bench NAME=search ARGS=...
ifdef NAME
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)
else
	@for file in benchmarks/*.py; do \
		printf '%-12s %s\n' "$$(basename $$file .py)" "$$(sed -n '1s/"""//gp' $$file)"; done
endif

image: $(STAMP) ## Build the container image and tune a real training against it (ARGS=...)
	$(BIN)/python deploy/check_image.py $(ARGS)

clean: ## Remove the environment and everything built
	rm -rf $(VENV) .venv-torch-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache
	rm -rf autotune/*.egg-info client/*.egg-info *.egg-info
