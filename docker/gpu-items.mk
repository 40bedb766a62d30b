# What `make gpu` measures, in the order of worth. $(RUN) takes the minutes that an item may take, at most nine, what it
# finds out, and what it needs: `needs=device` a GPU, `needs=NAME` a program or a package. Without a GPU DRY is set: what
# does not need one then runs at toy sizes.
TESTS     := $(PY) -m pytest -q -p no:cacheprovider -m gpu
KERNELS   := $(TESTS) tests/attention/test_gpu.py
ATTENTION := $(PY) -m anlit benchmark attention
STEP      := $(PY) -m anlit benchmark step
SCALED    := --models anGPT --mechanisms scale-invariant --backends eager,triton,flex --peers none
COUNTERS  := --kernel-name 'regex:^(forward|backward_queries|backward_keys)$$' --launch-skip 4 --launch-count 3

SIZE          := --d_model 32 --vocab_size 64 --length 32 --batch 2
TOY_SIZE      := $(if $(DRY),$(SIZE) --rounds 1 --device cpu)
TOY_STEP      := $(if $(DRY),$(SIZE) --rounds 2 --preset cpu --n_layers 1 --n_heads 2 --compiled no --peers_compiled no)
TOY_ATTENTION := $(if $(DRY),--preset cpu --entrants 'plain$(COMMA)sdpa scale-invariant$(COMMA)blockwise' --widths 16 \
    --lengths 64 --rounds 2)

ITEMS := device kernels-bfloat16 libraries memory-checker flex attention-4k attention-16k attention-documents \
    attention-64k step-models step-scale-invariant step-documents step-peers step-1b loss step-growth profile \
    counters float8 kernels-float16 kernels-float32 clocks

device:
	$(RUN) 2 'the device, its driver and libraries' sh -c '$(PY) -m torch.utils.collect_env | grep -v ^Vulnerability'
kernels-bfloat16:
	$(RUN) 5 'our Triton kernels against eager attention in float64, bfloat16' needs=device needs=xdist \
	    $(KERNELS) -k 'triton and (torch.bfloat16 or bits)' -n 8
libraries:
	$(RUN) 5 'flash attention, the loss, compiled and uncompiled models on CUDA' needs=device needs=xdist \
	    $(KERNELS) tests/models/test_cuda.py tests/layers/test_cross_entropy.py \
	    -k 'flash or test_cuda or test_cross_entropy' -n 6
memory-checker:
	$(RUN) 4 'compute-sanitizer on our kernels at a ragged length' needs=device needs=compute-sanitizer \
	    compute-sanitizer --tool memcheck --error-exitcode 9 $(KERNELS) -k 'triton and bfloat16 and (80 or 256)'
flex:
	$(RUN) 4 'FlexAttention against eager attention in float64' needs=device $(KERNELS) -k flex
attention-4k:
	$(RUN) 4 'attention kernels at T 4096, dense' \
	    $(ATTENTION) --widths 64 --lengths 4096 --layouts dense $(TOY_ATTENTION)
attention-16k:
	$(RUN) 5 'attention kernels at T 16,384, dense' \
	    $(ATTENTION) --widths 64,128 --lengths 16384 --layouts dense $(TOY_ATTENTION)
attention-documents:
	$(RUN) 6 'attention kernels with packed documents' \
	    $(ATTENTION) --widths 64,128 --lengths 4096,16384 --layouts documents $(TOY_ATTENTION)
attention-64k:
	$(RUN) 6 'attention kernels at T 65,536, dense' \
	    $(ATTENTION) --widths 64,128 --lengths 65536 --layouts dense --rounds 6 $(TOY_ATTENTION)
step-models:
	$(RUN) 6 '0.5B steps of GPT+, nGPT, anGPT, compiled' $(STEP) --peers none $(TOY_STEP)
step-scale-invariant:
	$(RUN) 6 '0.5B steps of scale-invariant anGPT by back end' $(STEP) $(SCALED) $(TOY_STEP)
step-documents:
	$(RUN) 6 'the same with packed documents' $(STEP) $(SCALED) --documents $(TOY_STEP)
step-peers:
	$(RUN) 8 '0.5B steps against those of Qwen3 and litgpt' needs=transformers $(STEP) --models GPT $(TOY_STEP)
step-1b:
	$(RUN) 6 '1B steps: share of the peak' $(STEP) --preset h200-1b --models GPT,anGPT --peers none $(TOY_STEP)
loss:
	$(RUN) 2 'memory and time of projection and cross-entropy' $(PY) -m anlit benchmark loss $(TOY_SIZE)
step-growth:
	$(RUN) 8.5 'time and memory over T, the tokens of a batch constant' \
	    $(STEP) --preset h200-125m --batch 32 --lengths 512,1024,2048,4096,8192,16384,32768,65536 --peers none \
	    $(TOY_STEP) $(if $(DRY),--lengths 16$(COMMA)32)
profile:
	$(RUN) 4 'where a 0.5B step of anGPT spends its time' $(STEP) --models anGPT --peers none --profile $(TOY_STEP)
counters:
	$(RUN) 4 'Nsight Compute on our kernels at T 16,384, dense, D 64' needs=device needs=ncu \
	    ncu --set full $(COUNTERS) $(ATTENTION) --entrants scale-invariant,triton --widths 64 --lengths 16384 \
	    --layouts dense --rounds 1
float8:
	$(RUN) 5 '0.5B steps in float8' needs=device needs=torchao \
	    $(STEP) --models GPT,anGPT --compiled blocks,float8 --peers none
kernels-float16:
	$(RUN) 5 'our Triton kernels, float16' needs=device needs=xdist $(KERNELS) -k 'triton and torch.float16' -n 8
kernels-float32:
	$(RUN) 5 'our Triton kernels, float32' needs=device needs=xdist $(KERNELS) -k 'triton and torch.float32' -n 8
clocks:
	$(RUN) 3 'the logged time of a step and the estimate of its memory' needs=device \
	    $(TESTS) tests/training/test_throughput.py tests/sizing/test_estimate.py
