"""What `anlit benchmark gpu` runs, in the order of its worth: whether kernels are right, attention, steps, the rest."""

import sys

from anlit.benchmarks.gpu.runner import Item

GPU = "anlit.benchmarks.gpu"
TOY_STEP = (
    *("--preset", "cpu", "--compiled", "no", "--rounds", "2", "--d_model", "32", "--n_layers", "1", "--n_heads", "2"),
    *("--vocab_size", "64", "--length", "32", "--batch", "2", "--peers_compiled", "no"),
)
TOY_ATTENTION = ("--preset", "cpu", "--widths", "16", "--lengths", "64", "--rounds", "2")


def _module(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *options, "--output", "{folder}")


def _benchmark(name: str, *options: str) -> tuple[str, ...]:
    return _module("anlit", "benchmark", name, *options, "--minutes", "{minutes}")


def _tests(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *options)


def _kernels(precision: str, more: str = "") -> Item:
    command = _tests("tests/attention/test_triton.py", "-k", f"torch.{precision}{more}", "-n", "8")
    what = f"our Triton kernels against eager attention in float64, {precision}"
    return Item(f"kernels-{precision}", what, 5, command, ("-n", "1"), ("tests", "xdist"))


def _attention(name: str, what: str, minutes: float, *options: str) -> Item:
    return Item(f"attention-{name}", what, minutes, _benchmark("attention", *options), TOY_ATTENTION)


def _step(
    name: str, what: str, minutes: float, *options: str, needs: tuple[str, ...] = (), toy: tuple[str, ...] = TOY_STEP
) -> Item:
    return Item(f"step-{name}", what, minutes, _benchmark("step", *options), toy, needs)


OURS = ("--peers", "none")
COUNTERS = ("ncu", "--set", "full", "--kernel-name", "regex:^(forward|backward_queries|backward_keys)$",
            "--launch-skip", "4", "--launch-count", "3")  # fmt: skip
BACKENDS = ("--backends", "eager,triton,flex")
SCALE_INVARIANT = ("--models", "anGPT", "--mechanisms", "scale-invariant", *BACKENDS, *OURS)

ITEMS = (
    Item("device", "the device and its peaks", 3, _module(f"{GPU}.device")),
    _kernels("bfloat16", " or bits"),
    Item(
        "libraries",
        "flash attention's libraries, and compiled and uncompiled models on CUDA",
        5,
        _tests("tests/attention/test_flash.py", "tests/models/test_cuda.py", "tests/layers/test_cross_entropy.py", "-n",
               "6"),
        ("-n", "1"),
        ("tests", "xdist"),
    ),
    Item(
        "memory-checker",
        "compute-sanitizer on our kernels at a ragged length",
        4,
        ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9",
         *_tests("tests/attention/test_triton.py", "-k", "every_width and bfloat16 and (80 or 256)")),
        (),
        ("compute-sanitizer", "tests", "pytest"),
    ),
    Item("flex", "FlexAttention against eager attention in float64", 4, _tests("tests/attention/test_flex.py"), (),
         ("tests", "pytest")),
    _attention("4k", "kernels at T 4096, dense", 4, "--widths", "64", "--lengths", "4096", "--layouts", "dense"),
    _attention("16k", "kernels at T 16,384, dense", 5, "--widths", "64,128", "--lengths", "16384", "--layouts",
               "dense"),
    _attention("documents", "kernels with packed documents", 6, "--widths", "64,128", "--lengths", "4096,16384",
               "--layouts", "documents"),
    _attention("64k", "kernels at T 65,536, dense", 6, "--widths", "64,128", "--lengths", "65536", "--layouts",
               "dense", "--rounds", "4"),
    _attention("blocks", "block sizes of our Triton kernels", 8, "--blocks", "--layouts", "dense", "--lengths",
               "16384"),
    _step("models", "0.5B steps of GPT+, nGPT, anGPT, compiled", 6, *OURS),
    _step("scale-invariant", "0.5B steps of scale-invariant anGPT by back end", 6, *SCALE_INVARIANT),
    _step("documents", "the same with packed documents", 6, *SCALE_INVARIANT, "--documents"),
    _step("peers", "0.5B steps against Qwen3's and litgpt's", 8, "--models", "GPT", needs=("transformers",)),
    Item("profile", "where a 0.5B step of anGPT spends its time", 3, _module(f"{GPU}.profile"), ("--preset", "cpu")),
    _step("1b", "1B steps: share of the peak", 6, "--preset", "h200-1b", "--models", "GPT,anGPT", *OURS),
    Item("loss", "memory and time of projection and cross-entropy", 2, _benchmark("loss"),
         ("--device", "cpu", "--rounds", "1", *TOY_STEP[6:-2])),
    _step("growth", "time and memory over T, the tokens of a batch constant", 8.5, "--preset", "h200-125m", "--batch",
          "32", "--lengths", "512,1024,2048,4096,8192,16384,32768,65536", *OURS, toy=(*TOY_STEP, "--lengths", "16,32")),
    Item("counters", "Nsight Compute on our kernels at T 16,384, dense, D 64", 4, (*COUNTERS, *_benchmark(
        "attention", "--entrants", "scale-invariant,triton", "--widths", "64", "--lengths", "16384", "--layouts",
        "dense", "--rounds", "1")), (), ("ncu",)),
    _step("float8", "0.5B steps in float8", 5, "--models", "GPT,anGPT", "--compiled", "blocks,float8", *OURS,
          needs=("torchao",)),
    _kernels("float16"),
    _kernels("float32"),
    Item("clocks", "a step's time and its memory as logged and as estimated", 3,
         _tests("tests/training/test_throughput.py", "tests/sizing/test_estimate.py"), (), ("tests", "pytest")),
)  # fmt: skip
