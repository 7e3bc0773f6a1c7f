# Every target sets up what it needs in a fresh clone: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test fuzz lint types wheel bench setup clean

setup: $(VENV)/.done

# torch first and alone: the pinned version has a CPU build, an unpinned one pulls gigabytes.
# The oracles pin other releases of torch and transformers, beside which they also run: hence --no-deps.
$(VENV)/.done: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip "setuptools>=77"
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e ".[dev]"
	$(BIN)/python -m pip install -q --no-deps nemo-automodel==0.7.0 dflash==0.1.0 speculators==0.9.0 hs-connectors openai
	touch $@

demo: setup
	rm -rf .demo
	$(BIN)/kconv tiny k3 .demo/Kimi-K3-tiny --calm
	$(BIN)/kconv plan .demo/Kimi-K3-tiny
	$(BIN)/kconv convert .demo/Kimi-K3-tiny .demo/native --vision keep
	$(BIN)/kconv verify .demo/native --source .demo/Kimi-K3-tiny --all
	$(BIN)/kconv convert .demo/native .demo/back --to hf
	$(BIN)/kconv verify .demo/back --source .demo/native --all
	$(BIN)/kconv convert tests/data/golden/calm-k3 .demo/calm
	$(BIN)/kconv verify-parity .demo/calm --reference tests/data/golden/calm-k3/golden.safetensors --dtype float64

test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

fuzz: setup
	$(BIN)/python -m tests.fuzz --trials 8000 --jobs $(WORKERS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python -m tests.house

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m tests.bench

clean:
	rm -rf .demo build dist *.egg-info
