# The first hour on a GPU (docs/benchmarks.md), called by `make gpu`. A call ends after MINUTES; the next one goes on.
# STATE holds a stamp for each finished item, NAME.d with what it wrote, the compilers' caches, and a virtual environment
# with the WHEELS over the packages of GPU_PYTHON. OUTPUT is written anew after each item.
ROOT    := $(abspath $(dir $(lastword $(MAKEFILE_LIST)))..)
DRY     := $(shell test -e /dev/nvidiactl || nvidia-smi > /dev/null 2>&1 || echo yes)
STATE   ?= runs/gpu-state$(if $(DRY),-dry)
OUTPUT  ?= runs/gpu$(if $(DRY),-dry)
WHEELS  ?= build/gpu-wheels
LIST    ?= docker/gpu-items.mk
MINUTES ?= 9
TIME    := $(shell echo $$((60 * $(MINUTES))))
# No item begins with less time than this, in seconds.
LEAST   := 15
AGAIN   ?=
GPU_PYTHON ?= python3
TOGETHER := $(if $(DRY),3,1)
COMMA   := ,

.DEFAULT_GOAL := gpu
.PHONY: gpu items

# What the items need, within STATE.
PY  := $(CURDIR)/venv/bin/python
RUN  = @sh $(ROOT)/docker/gpu_item.sh $@
include $(LIST)
export ROOT OUTPUT DRY TIME LEAST DEADLINE ITEMS PY
export PYTHONPATH := $(ROOT)
export PYTHONUNBUFFERED := 1
$(if $(DRY),$(eval export OMP_NUM_THREADS := 1))
export TRITON_CACHE_DIR := $(CURDIR)/caches/triton
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/caches/inductor
export CUDA_CACHE_PATH := $(CURDIR)/caches/cuda
export XDG_CACHE_HOME := $(CURDIR)/caches/other

gpu:
	@mkdir -p $(STATE) $(OUTPUT)
	@$(MAKE) --no-print-directory --silent -f $(ROOT)/docker/gpu.mk $(STATE)/venv/.ready
	@cd $(STATE) && deadline=$$(($$(date +%s) + $(TIME))) && \
	    if [ "$(AGAIN)" = failed ]; then grep -ls '^failed' $(ITEMS) | xargs rm -f; else rm -f $(AGAIN); fi && \
	    { flock --nonblock .lock true || echo "Another call, or an item that it left, still runs: waiting for its end."; } && \
	    flock --wait $(TIME) .lock $(MAKE) --no-print-directory -j$(TOGETHER) \
	    -f $(ROOT)/docker/gpu.mk items OUTPUT=$(abspath $(OUTPUT)) LIST=$(abspath $(LIST)) DEADLINE=$$deadline

items: $(ITEMS)
	@set --; for item in $(ITEMS); do [ -e $$item ] || grep -qsE '^(left out|no device)' $$item.d/status || set -- "$$@" $$item; done; \
	    [ $$# = 0 ] && echo "All items are finished, see $(OUTPUT)/gpu.md." || \
	    { echo "See $(OUTPUT)/gpu.md. Call make gpu again for: $$*."; exit 75; }

# The .pth file is read like those of site-packages, and so are the .pth files of the folders that it names.
$(STATE)/venv/.ready: $(wildcard $(WHEELS)*/*.whl)
	$(GPU_PYTHON) -m venv --without-pip --clear $(@D)
	$(GPU_PYTHON) -c 'import site; print(*(f"import site; site.addsitedir({f!r})" for f in site.getsitepackages()), sep="\n")' \
	    > $$(echo $(@D)/lib/python3*/site-packages)/beneath.pth
	$(if $^,$(GPU_PYTHON) -m pip --python $(@D)/bin/python install --quiet --no-index --no-deps --no-compile $^)
	@touch $@
