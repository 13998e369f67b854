# `make demo` and `make test` work on a fresh machine with Python 3.11+; each makes .venv if it is missing.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
# Another version of PyTorch, `make test TORCH=2.15.0`, gets an environment of its own (gigabytes, where its wheels are for CUDA).
TORCH ?= 2.13.0
# Its Triton interprets kernels with older NumPy only.
NUMPY := $(if $(filter 2.11.%,$(TORCH)),"numpy<2.4")
VENV := $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN := $(VENV)/bin
RUN := $(BIN)/python

.PHONY: demo test check bench docs pictures gpu soak soak-rooms soak-files soak-tiers soak-fleets soak-ranks soak-misuse

INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

# What the demo needs, and then what tests, checks, benchmarks and the documentation need.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "torch==$(TORCH)"
	printf '%s\n' "torch==$(TORCH)" $(NUMPY) > $(VENV)/constraints.txt
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[report]"
	touch $(VENV)/installed

$(VENV)/ready: $(VENV)/installed
	$(INSTALL) -c $(VENV)/constraints.txt -e ".[dev]"
	touch $(VENV)/ready

demo: $(VENV)/installed
	$(BIN)/penstock demo

# What hangs is ended; the longest tests take over a minute on a quiet core, and several times that on a busy one.
# Both parts run, whatever the first finds.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest --timeout 900 -n logical --maxprocesses 8 --dist worksteal
test: $(VENV)/ready
	found=0; $(PYTEST) || found=1; $(PYTEST) tests/device --device sim || found=1; exit $$found

check: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs src benchmarks examples tests

# What benchmarks find lands in one folder; what is worth keeping goes to benchmarks/results under its date.
OUT ?= bench-results
bench: $(VENV)/ready
	mkdir -p $(OUT)
	$(RUN) -m benchmarks.offload --json $(OUT)/offload.json
	$(RUN) -m benchmarks.fleet --json $(OUT)/fleet.json
	$(RUN) -m benchmarks.fleet_training --json $(OUT)/fleet-training.json
	$(RUN) -m benchmarks.fleet_table --host 10GiB --json $(OUT)/fleet-table.json
	$(RUN) -m benchmarks.planner --json $(OUT)/planner.json
	$(RUN) -m benchmarks.planning --json $(OUT)/planning.json
	$(RUN) -m benchmarks.state_plans --json $(OUT)/state-plans.json
	$(RUN) -m benchmarks.remat --json $(OUT)/remat.json
	$(RUN) -m benchmarks.relational --json $(OUT)/relational.json
	$(RUN) -m benchmarks.relational_stream --json $(OUT)/relational-stream.json
	$(RUN) -m benchmarks.unified --json $(OUT)/unified.json
	$(RUN) -m benchmarks.advisor --json $(OUT)/advisor.json

# The site, into site/.
docs: $(VENV)/ready
	$(BIN)/mkdocs build --strict

# The screenshots of reports and of the command line's tables, into docs/pictures; needs Chromium.
pictures: $(VENV)/ready
	$(RUN) -m benchmarks.pictures
	$(RUN) -m benchmarks.cli_pictures

# Long campaigns, outside CI: an hour over all rooms, alone and together, under faults; damaged files of every format;
# 10,000 put/get cycles under random faults; 100 faults against fleets; 1,000 against tables that ranks share; misuse of
# everything public. Each runs whatever the others found.
MINUTES ?= 60
soak: $(VENV)/ready
	$(MAKE) -k soak-rooms soak-files soak-tiers soak-fleets soak-ranks soak-misuse

soak-rooms: $(VENV)/ready
	mkdir -p $(OUT)
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.soak --minutes $(MINUTES) --json $(OUT)/soak.json

soak-files: $(VENV)/ready
	mkdir -p $(OUT)
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.fuzz --minutes 10 --json $(OUT)/fuzz.json

soak-tiers: $(VENV)/ready
	$(RUN) -m benchmarks.soak_tiers

soak-fleets: $(VENV)/ready
	$(RUN) -m benchmarks.fleet_faults

soak-ranks: $(VENV)/ready
	mkdir -p $(OUT)
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.unified_faults --json $(OUT)/unified-faults.json

soak-misuse: $(VENV)/ready
	mkdir -p $(OUT)
	OMP_NUM_THREADS=1 $(RUN) -m benchmarks.misuse --json $(OUT)/misuse.json

# What only a GPU can show, in the order of what is worth most. From the source tree, with the Python of the machine:
# nothing is installed. Results land in one folder; what has come to its end is not run again.
GPU_OUT ?= gpu-results
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu --out $(GPU_OUT)
