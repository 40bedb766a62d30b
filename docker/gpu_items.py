"""The plan of `make gpu`: its items and their seconds, the most valuable first.

An item is a command for bash, run in the root of the clone. $OUT is the item's folder, and
$STATE/NAME is the folder of the item NAME. `SIZES` gives the values of $STEP and other names in
capitals, without a GPU `TOY_SIZES`. $CORPUS is texts/english if it exists, else Python's sources.
$PEER is litgpt if it is installed, else none.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A command of the plan.

    Args:
        name: The name of the item and its folder.
        command: The command for bash.
        finds: The question that its result answers.
        needs: "device", programs or Python packages. The item is left out if one is missing.
        inputs: Names of items that write files for it.
        gigabytes: GPU memory of an item that runs beside other items.
    """

    name: str
    command: str
    finds: str
    needs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    gigabytes: int = 0


@dataclass(frozen=True)
class Phase:
    """Items that run beside each other. All end after `seconds`."""

    seconds: int
    items: list[Item]


SIZES = {
    "STEP": "python -m anlit benchmark step",
    "ATTENTION": "python -m anlit benchmark attention",
    "SHORT": "--widths 64 --lengths 4096",
    "KERNELS": "--kernels triton,flex",
    "GROWTH": "--preset h200-125m --batch 32 --lengths 1024,4096,16384,65536",
    "VOCABULARY": "--vocab_size 8192",
    "RUN": (
        "--data TokenShards --data.path $STATE/prepare/data --run_dir $OUT/run --seed_everything 1"
        " --data.batch_size 64 --data.val_blocks 256 --data.num_workers 2"
        " --model.n_layers 12 --model.n_heads 6 --model.d_model 384 --model.context_length 1024"
        " --model.vocab_size 8192 --trainer.precision bf16-mixed --trainer.gradient_clip_val 1.0"
        " --trainer.log_every_n_steps 10 --trainer.val_check_interval 20"
    ),
    "LARGE": (
        "--model.n_layers 24 --model.n_heads 16 --model.d_model 1024 --model.context_length 2048"
        " --data.batch_size 8 --trainer.limit_val_batches 0 --trainer.max_steps 60"
    ),
    "STEPS": "--steps 200",
    "LEARNING": "--trainer.max_steps 300 --trainer.val_check_interval 50",
    # -v: a result for each test, also if the tests are over their time.
    "PYTEST": "python -m pytest -v -p no:cacheprovider -m gpu",
}

_TOY_MODEL = "--d_model 32 --n_layers 1 --n_heads 2 --vocab_size 64 --length 32 --batch 2"
TOY_SIZES = SIZES | {
    "STEP": (
        f"python -m anlit benchmark step --preset cpu {_TOY_MODEL} --rounds 2 --compiled no"
        " --peers_compiled no"
    ),
    "ATTENTION": (
        "python -m anlit benchmark attention --preset cpu --widths 16 --rounds 2"
        " --kernels 'plain,sdpa scale-invariant,blockwise'"
    ),
    "SHORT": "--lengths 32",
    "KERNELS": "--kernels blockwise,eager",
    "GROWTH": "--lengths 16,32",
    "CORPUS": "TextFiles --source docs --pattern '*.md' --tokenizer bpe",
    "VOCABULARY": "--vocab_size 512",
    "RUN": (
        "--data TokenShards --data.path $STATE/prepare/data --run_dir $OUT/run --seed_everything 1"
        " --data.batch_size 4 --data.val_blocks 8 --data.num_workers 0"
        " --model.n_layers 1 --model.n_heads 2 --model.d_model 32 --model.context_length 64"
        " --model.vocab_size 512 --trainer.accelerator cpu --trainer.log_every_n_steps 1"
    ),
    "LARGE": "--model.n_layers 2 --trainer.limit_val_batches 0 --trainer.max_steps 6",
    "STEPS": "--steps 40",
    "LEARNING": "--trainer.max_steps 6 --trainer.val_check_interval 3",
}

GPU = ("device",)
TESTS = ("device", "xdist")
TEXT = ("prepare",)
LEARNING = ("learn-gpt", "learn-ngpt", "learn-angpt")

MODELS = "$STEP --models GPT,nGPT,anGPT"
DOCUMENTS = f"{MODELS} --documents --peers none"
SCALE_INVARIANT = "$STEP --models anGPT --mechanisms plain,scale-invariant $KERNELS --peers none"
KERNEL_TESTS = "$PYTEST tests/nn/attention/test_gpu.py -n 4"
FIT = "python -m anlit fit --config"
GPT = f"{FIT} model/gpt.yaml $RUN"
NGPT = f"{FIT} model/ngpt.yaml $RUN"
ANGPT = f"{FIT} model/angpt.yaml $RUN"
DDP = f"{FIT} model/gpt.yaml --config trainer/ddp.yaml $RUN --trainer.devices 1"
FSDP = f"{FIT} model/angpt.yaml --config trainer/fsdp.yaml $RUN --trainer.devices 1"
CONTINUED = "{0} --trainer.max_steps 40 && {0} --trainer.max_steps 60 --ckpt_path last"
# Each printed line begins with the seconds since the command.
WITH_SECONDS = (
    'set -o pipefail; {} 2>&1 | while IFS= read -r line; do echo "$SECONDS s $line"; done'
)
TOOLS = """TIMEFORMAT="%R s"; set -e
time python -m anlit validate $STATE/learn-gpt/run
time python -m anlit generate $STATE/learn-gpt/run "The kernel"
time python -m anlit score $STATE/learn-gpt/run README.md --output $OUT/scores.parquet
time python -m anlit lengths $STATE/learn-gpt/run --output $OUT/lengths"""

# These items compile the code of later phases into caches, beside the tests. Gigabytes on an H200.
COMPILE_AND_CHECK = [
    Item("warm-models", f"{MODELS} --peers none --rounds 1", "the three models compile",
         needs=GPU, gigabytes=50),
    Item("prepare", "python -m anlit prepare $CORPUS --output $OUT/data $VOCABULARY",
         "text becomes shards"),
    Item("tests-triton-bfloat16", f"{KERNEL_TESTS} -k 'triton and (torch.bfloat16 or bits)'",
         "our kernels against attention in float64", needs=TESTS, gigabytes=5),
    Item("warm-documents", f"{DOCUMENTS} --rounds 1", "the same for packed documents",
         needs=GPU, gigabytes=50),
    Item("warm-fit", f"{GPT} --trainer.max_steps 2", "a run compiles",
         needs=GPU, inputs=TEXT, gigabytes=10),
    Item("warm-attention", "$ATTENTION --widths 128,64 --lengths 16384 --rounds 1",
         "attention kernels compile", needs=GPU, gigabytes=2),
    Item("tests-flash-flex", f"{KERNEL_TESTS} -k 'flash or flex'",
         "flash and FlexAttention against attention in float64", needs=TESTS, gigabytes=5),
    Item("tests-models",
         "$PYTEST -n 3 tests/nn/models/test_cuda.py tests/nn/layers/test_cross_entropy.py"
         " tests/training/test_throughput.py tests/sizing/test_estimate.py",
         "models on CUDA, the loss, the logged time of a step, the estimate of memory",
         needs=TESTS, gigabytes=10),
    Item("warm-scale-invariant", f"{SCALE_INVARIANT} --rounds 1", "scale-invariant anGPT compiles",
         needs=GPU, gigabytes=52),
    Item("warm-litgpt", "$STEP --models none --peers litgpt --rounds 1",
         "litgpt's model compiles", needs=(*GPU, "litgpt"), gigabytes=30),
    Item("tests-triton-float16", f"{KERNEL_TESTS} -k 'triton and torch.float16'",
         "our kernels in float16", needs=TESTS, gigabytes=5),
    Item("tests-triton-float32", f"{KERNEL_TESTS} -k 'triton and torch.float32'",
         "our kernels in float32", needs=TESTS, gigabytes=5),
]  # fmt: skip

LEARN_AND_SHARD = [
    Item("learn-gpt", f"{GPT} $LEARNING", "35M GPT+ learns", inputs=TEXT),
    Item("learn-ngpt", f"{NGPT} $LEARNING", "35M nGPT learns", inputs=TEXT),
    Item("learn-angpt", f"{ANGPT} $LEARNING", "35M anGPT learns", inputs=TEXT),
    Item("ddp", CONTINUED.format(DDP), "DDP on one GPU, 40 steps, continued to 60",
         needs=GPU, inputs=TEXT),
    Item("fsdp", CONTINUED.format(FSDP), "FSDP on one GPU, 40 steps, continued to 60",
         needs=GPU, inputs=TEXT),
]  # fmt: skip

PLAN = [
    Phase(170, COMPILE_AND_CHECK),
    Phase(125, [Item("step", f"{MODELS} --peers $PEER --profile",
                     "0.5B steps of the three models and litgpt's, and their kernels")]),
    Phase(75, [Item("step-documents", DOCUMENTS, "the three models with packed documents")]),
    Phase(75, [Item("fit",
                    "python -m anlit benchmark fit $STEPS --rounds 1"
                    " -- --config model/gpt.yaml $RUN",
                    "a run of 35M GPT+ on text, and its bare steps", inputs=TEXT)]),
    Phase(50, [Item("fit-large", WITH_SECONDS.format(f"{GPT} $LARGE"),
                    "a run of 0.5B GPT+: its first step, its speed", inputs=TEXT)]),
    Phase(130, LEARN_AND_SHARD),
    Phase(60, [Item("tools", TOOLS, "seconds of validate, generate, score, lengths on a run",
                    inputs=("learn-gpt",))]),
    Phase(65, [Item("step-scale-invariant", SCALE_INVARIANT, "scale-invariant anGPT by kernel")]),
    Phase(50, [Item("attention-4k", "$ATTENTION $SHORT", "attention kernels at T 4096")]),
    Phase(60, [Item("attention-16k", "$ATTENTION --widths 128,64 --lengths 16384 --rounds 5",
                    "attention kernels at T 16,384", needs=GPU)]),
    Phase(25, [Item("compare",
                    "python -m anlit compare --output $OUT"
                    " $STATE/learn-gpt/run $STATE/learn-ngpt/run $STATE/learn-angpt/run",
                    "the three runs compared", inputs=LEARNING)]),
    # Without caches: these compile first.
    Phase(120, [Item("step-qwen3", "$STEP --models GPT --peers transformers",
                     "0.5B steps of GPT+ and transformers' Qwen3", needs=("transformers",))]),
    Phase(90, [Item("step-1b", "$STEP --preset h200-1b --models GPT,anGPT --peers none",
                    "1B steps: share of the peak", needs=GPU)]),
    Phase(100, [Item("step-float8",
                     "$STEP --models GPT --compiled blocks,float8 --peers none",
                     "0.5B steps in float8", needs=(*GPU, "torchao"))]),
    Phase(150, [Item("step-growth", "$STEP $GROWTH --models GPT,anGPT --peers none",
                     "time and memory over T, the tokens of a batch constant")]),
]  # fmt: skip
