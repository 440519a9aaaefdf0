# Needs only make and python3 (3.11 or newer). Everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
DEMO_ARGS ?=
BENCH_ARGS ?= --rounds 3 --write
OPINFO_ARGS ?=
ORACLE_ARGS ?= --count 300

# torch goes in first and alone, so that no later step picks another build: without an NVIDIA GPU that is the CPU build of exactly this
# version; where nvidia-smi works, the CUDA builds of torch and JAX.
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
ifeq ($(GPU),yes)
TORCH := 'torch>=2.11,<2.14'
JAX_CUDA := 'jax[cuda12]>=0.10,<0.12'
else
TORCH := torch==2.13.0
JAX_CUDA :=
endif

# A recipe that fails leaves no stamp, so the next run tries again.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-deep test-processes test-all oracle lint style notebooks bench opinfo clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## train a small Llama on Python's documentation, then one on 32 emulated NeuronCores (a few minutes)
	$(BIN)/python examples/char_lm.py $(DEMO_ARGS)
	$(BIN)/nxd-run --instance trn1.32xlarge examples/llama/train.py --tp 8 --batch 1 --steps 60 --out demo_output/llama

# Whole files go to workers, those that take longest first (tests/durations.py). Options in PYTEST_ADDOPTS come last and win.
# Bytecode is kept in any case: rewriting the assertions of all test files takes half a minute, and every tier needs them.
PYTEST = PYTHONDONTWRITEBYTECODE= PYTEST_ADDOPTS="-n 2 --dist loadfile --no-loadscope-reorder $(1) $$PYTEST_ADDOPTS" $(BIN)/python -m pytest

# mypy takes one core for most of a minute, the tests two: side by side they end sooner, and each says what it has to say.
TYPED = $(BIN)/python -m mypy > $(VENV)/mypy.log 2>&1 & types=$$!; $(1); tests=$$?; \
	wait $$types; typed=$$?; cat $(VENV)/mypy.log; [ $$tests -eq 0 ] && [ $$typed -eq 0 ]

test: $(VENV)/dev.stamp style ## lint, type check and test the core of every feature (minutes)
	$(call TYPED,$(call PYTEST,--tier core))

test-deep: $(VENV)/dev.stamp ## test grids, generated programs and whole trainings
	$(call PYTEST,--tier deep)

test-processes: $(VENV)/dev.stamp ## test what starts processes: commands, torchrun, notebooks, examples
	$(call PYTEST,--tier processes)

test-all: export RANDOM_PROGRAMS ?= 1000
test-all: $(VENV)/dev.stamp style ## lint, type check and run all tests with all their cases (an hour)
	$(call TYPED,$(call PYTEST,--all))

oracle: $(VENV)/dev.stamp ## generated programs of ranks, in one process and under torchrun (ORACLE_ARGS="--count 1000 --seed 5")
	$(BIN)/python -m tests.torch_bridge.ranks.oracle $(ORACLE_ARGS)

lint: $(VENV)/dev.stamp style ## ruff check, ruff format --check, mypy
	$(BIN)/python -m mypy

style: $(VENV)/dev.stamp
	$(BIN)/python -m ruff check --no-cache .
	$(BIN)/python -m ruff format --check --no-cache .

notebooks: $(VENV)/dev.stamp ## write notebooks/*.ipynb from the scripts beside them, without outputs
	$(BIN)/python -m tests.notebooks.pairs

bench: $(VENV)/dev.stamp ## time a training step against hand-written JAX, original torch_xla and eager PyTorch (an hour)
	$(BIN)/python benchmarks/step_time.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/zoo.py $(BENCH_ARGS)

opinfo: $(VENV)/dev.stamp ## run torch's databases of ops, modules and optimizers against the CPU (half an hour)
	$(BIN)/python -m tests.opinfo --jobs 2 $(OPINFO_ARGS)

clean: ## remove the environment, caches and outputs
	rm -rf $(VENV) .cache demo_output .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/torch.stamp:
	$(PYTHON) -c 'import sys; sys.exit("nxd_jax needs Python 3.11 or newer; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) $(JAX_CUDA) -e '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) $(JAX_CUDA) -e '.[dev]'
	$(PIP) --no-deps --upgrade --target $(VENV)/lightning-oldest pytorch-lightning==2.5.0
	touch $(VENV)/demo.stamp $@
