# Two commands do all set-up: `make demo` and `make test`. Each makes .venv itself and can be run again.
PYTHON ?= python3
VENV   ?= .venv
RUNS   ?= runs/demo
BUDGET ?= cpu
BIN    := $(VENV)/bin
# CPU or CUDA build of torch: cpu where no NVIDIA driver answers.
TORCH_BUILD ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

# Processes that run tests; the tests of a file stay together, for they share trained runs.
JOBS    ?= 2
BESIDE  := --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

# numpy 2.4 and newer break the interpreter of triton 3.6.
TORCH211 := tests/accelerator tests/nn/models/test_compiled.py tests/nn/attention

EXTRAS  ?=
VARIANT ?= cuda
IMAGE   ?= anlit
WHEELS  ?= build/gpu-wheels
STATE   ?= runs/gpu-state
OUTPUT  ?= runs/gpu
MINUTES ?= 9
AGAIN   ?=
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
ENGINE  ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-torch211 check format study sweep english install extras image image-check slurm-check gpu gpu-wheels clean

help:  ## Show what can be made
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.installed  ## Train GPT+, nGPT, anGPT on this machine's Python sources and plot them (10 minutes on 2 cores)
	$(BIN)/anlit demo --output $(RUNS)

test: $(VENV)/.installed-dev  ## Fast tests (10 to 12 minutes on 2 cores; JOBS=4 on more)
	$(BIN)/python -m pytest $(BESIDE)

test-slow: $(VENV)/.installed-dev  ## Also the long ones: real runs, killed and resumed
	$(BIN)/python -m pytest -m "slow or not slow" $(BESIDE)

test-torch211:  ## Compilation and attention with torch 2.11 and triton 3.6, as many GPU machines have them
	PYTHON="$(PYTHON)" VENV="$(VENV)-torch211" TORCH=2.11.0 TORCH_BUILD="$(TORCH_BUILD)" sh docker/install.sh test
	$(VENV)-torch211/bin/python -m pip install --quiet --no-deps "triton==3.6.*" "numpy==2.3.*"
	OMP_NUM_THREADS=1 nice $(VENV)-torch211/bin/python -m pytest $(BESIDE) $(TORCH211)

check: $(VENV)/.installed-dev  ## Lint, format, types and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev  ## Format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

study: $(VENV)/.installed  ## GPT+, nGPT, anGPT tuned alike, three seeds each, with a report (an hour and a half on 2 cores; BUDGET=1gpu)
	$(BIN)/anlit study --config study/convergence.yaml --budget $(BUDGET) $(if $(filter cpu,$(BUDGET)),--jobs 2 --threads 1)

sweep: $(VENV)/.installed  ## The tuning behind the demo, and its arms on three seeds (an hour on 2 cores)
	$(BIN)/anlit study --config study/convergence.yaml --budget demo --jobs 2 --threads 1

english:  ## 117 MB of English prose from Debian packages into texts/english (study/english.yaml)
	$(PYTHON) docker/english_corpus.py texts/english

image:  ## Container image, tagged by version (VARIANT=cuda|cpu; docker/README.md)
	@VARIANT="$(VARIANT)" IMAGE="$(IMAGE)" ENGINE="$(ENGINE)" sh docker/build_image.sh $(IMAGE_FLAGS)

image-check:  ## Really build the CPU image, train and validate in it (root, buildah, debootstrap)
	@docker/check_image.sh

slurm-check: $(VENV)/.installed  ## Really train, pre-empt and resume under Slurm on loopback (root, slurmd, slurmctld)
	@ANLIT="$(BIN)/anlit" docker/slurm/check.sh

gpu:  ## The first fifteen minutes on a GPU, in calls of MINUTES=9 (docs/benchmarks.md)
	@"$(GPU_PYTHON)" docker/gpu.py --minutes "$(MINUTES)" --again "$(AGAIN)" --state "$(STATE)" --output "$(OUTPUT)" --wheels "$(WHEELS)"

gpu-wheels:  ## Collect what a GPU machine without a network lacks, into WHEELS (WITH="scipy pytest"; MORE=flash4)
	@PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" MORE="$(MORE)" WITH="$(WITH)" sh docker/gpu_wheels.sh

install: $(VENV)/.installed  ## Only make the virtual environment

extras: $(VENV)/.installed  ## Optional packages, torch left as it is (EXTRAS=cluster, eval, float8, gs, triton, flash, flash4, wandb)
	@[ -n "$(EXTRAS)" ] || { echo "give the packages' purpose: make extras EXTRAS=eval"; exit 2; }
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_BUILD="$(TORCH_BUILD)" sh docker/install.sh "$(EXTRAS)"

$(VENV)/.installed: pyproject.toml docker/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_BUILD="$(TORCH_BUILD)" sh docker/install.sh
	@touch $@

$(VENV)/.installed-dev: pyproject.toml docker/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH_BUILD="$(TORCH_BUILD)" sh docker/install.sh test,dev
	@touch $(VENV)/.installed $@

clean:  ## Remove the virtual environment, runs and prepared data
	rm -rf $(VENV) runs data
