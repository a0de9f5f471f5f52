# make demo    set up, train a small language model once, decode it with three backends
# make test    set up, check style, run every test
# make demo-tp shard that model's LM head over RANKS processes, decode, check that all agree
# make lint    style only          make format   let ruff fix what it can
# make idioms  rewrite README's table of idioms from the tests
# make clean   remove everything that was made here
#
# The first run creates .venv and installs into it; later runs start at once.
#   make demo DEMO_ARGS="--temperature 0.7 --tokens 40"
#   make test PYTEST_ARGS="tests/test_ops.py -k dtype"
#   make demo TORCH=torch                              # the newest torch: the CUDA build on Linux

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
RANKS ?= 2
DEMO_ARGS ?=
PYTEST_ARGS ?= -n 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TORCH_SPEC := $(VENV)/.torch

# Threads that wait by spinning crawl when there are more of them than cores, as in parallel tests.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo demo-tp test lint format idioms setup clean always

demo: $(INSTALLED)
	$(BIN)/python examples/decode.py $(DEMO_ARGS)

demo-tp: $(INSTALLED)
	$(BIN)/torchrun --nproc-per-node $(RANKS) examples/tensor_parallel.py $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

idioms: $(INSTALLED)
	$(BIN)/python tests/idiom_table.py

setup: $(INSTALLED)

# One pip call, so that everything is resolved against the torch that was asked for.
$(INSTALLED): pyproject.toml $(TORCH_SPEC)
	@echo "installing $(TORCH) and the rest into $(VENV), about a minute"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check '$(TORCH)' --editable '.[test,examples]'
	@touch $@

# Touched only when TORCH differs from the last run's, which then installs again.
$(TORCH_SPEC): always
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
