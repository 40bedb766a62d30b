"""`anlit benchmark attention`: kernels compared over head width, sequence length and documents.

Each mechanism with its kernel is first checked against the formula in float64, output and
gradients. A wrong kernel is not timed. The others take turns in this one process. A column marks
the kernel that `kernel: auto` takes. To take another: `--model.kernel NAME`.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from anlit.benchmarks.attention_check import Inputs, fault_of, random_documents, relative_errors
from anlit.benchmarks.harness import Benchmark, CaseGroup, NotTimedError, Ready
from anlit.benchmarks.options import (
    DTYPES,
    MECHANISMS,
    benchmark_parser,
    parse,
)
from anlit.benchmarks.tables import Row
from anlit.config.options import ToolParser, numbers
from anlit.nn.kernels import KERNELS, batch_limit, default_kernel, prepare
from anlit.nn.models.runtime import flush_denormals

MEAN_DOCUMENT = 1 / 8
"""Mean length of a document as a share of T. Lengths are exponential: some are a few tokens."""
LAYOUTS = ("dense", "documents")
"""Each row has one document, or many."""
BACKWARD = 2.5
"""FLOPs of the backward pass over FLOPs of the forward pass. It has five matrix products, the
forward pass two, because it recomputes the scores."""
PRESETS = {
    "h200": {
        "kernels": "plain,sdpa plain,flash plain,flex plain,triton log-n,flash "
        "scale-invariant,flex scale-invariant,triton scale-invariant-learned,triton",
        "widths": (64, 128),
        "lengths": (2048, 4096, 16384, 65536),
        "rounds": 10,
        "tokens": 16384,
        "d_model": 2048,
        "dtype": "bfloat16",
    },
    "cpu": {
        "kernels": "plain,sdpa plain,blockwise plain,eager alibi,sdpa alibi,blockwise "
        "scale-invariant,blockwise scale-invariant,eager",
        "widths": (64,),
        "lengths": (256, 1024, 4096),
        "rounds": 7,
        "tokens": 4096,
        "d_model": 128,
        "dtype": "float32",
    },
}
"""`tokens` is the least B·T: a sequence that is longer fills the batch alone. `d_model` is H·D."""


def mechanisms_with_kernels(text: str) -> tuple[tuple[str, str], ...]:
    """Read the pairs in `mechanism,kernel mechanism,kernel …`."""
    pairs = []
    for entry in text.split():
        mechanism, _, kernel = entry.partition(",")
        if mechanism not in MECHANISMS or kernel not in KERNELS:
            choices = f"{', '.join(MECHANISMS)}; the kernels are {', '.join(KERNELS)}"
            raise argparse.ArgumentTypeError(f"{entry} is not known: the mechanisms are {choices}")
        pairs.append((mechanism, kernel))
    return tuple(pairs)


def groups_by_shape(options: argparse.Namespace) -> Iterator[CaseGroup]:
    """Yield a group for each shape. A time limit leaves out the longest, which come last."""
    for length, width, layout in product(options.lengths, options.widths, LAYOUTS):
        heads = max(1, options.d_model // width)
        batch = max(1, options.tokens // length)
        shape = {
            "width": width,
            "length": length,
            "documents": layout == "documents",
            "heads": heads,
            "batch": batch,
        }
        cases = []
        for mechanism, kernel in options.kernels:
            label = f"{mechanism}, {kernel}"
            case = {"label": label, "mechanism": mechanism, "kernel": kernel, "shape": shape}
            cases.append(case)
        title = f"D {width}, T {length}, {layout}, {batch} × {heads} heads"
        yield CaseGroup(title, partial(_build, DTYPES[options.dtype], options.device), cases)


def _build(dtype: torch.dtype, device: torch.device, row: Row, earlier_rows: list[Row]) -> Ready:
    """Check and prepare a kernel. NotTimedError if it does not support the case, or is wrong."""
    width, length, is_packed, heads, batch = row["shape"].values()
    mean = MEAN_DOCUMENT * length if is_packed else None
    layer = MECHANISMS[row["mechanism"]].for_layer(heads, width, 0)
    kernel = KERNELS[row["kernel"]]
    documents = random_documents(batch, length, mean, device)
    inputs = Inputs(layer, documents, batch, heads, heads, width, dtype)
    mechanism = inputs.mechanism

    if reason := kernel.unsupported_reason(mechanism, inputs.q):
        raise NotTimedError(reason)
    name = row["kernel"]
    if reason := batch_limit(name, mechanism, inputs.q, inputs.documents, batch, dropout=0.0):
        raise NotTimedError(reason)
    row["auto"] = default_kernel(mechanism, device.type, is_packed, inputs.q)
    prepare(kernel, mechanism, inputs.documents, batch)
    row["error"] = relative_errors(inputs, kernel.attend)
    if fault := fault_of(row["error"], dtype):
        raise NotTimedError(f"it is wrong: {fault}")

    on_host = random_documents(batch, length, mean, torch.device("cpu"))
    visible = int(on_host.n_visible(torch.float64, mechanism.window).sum())
    n_equal_rows = 1 if is_packed else batch  # `n_visible` counts equal rows once
    forward = 4.0 * width * heads * visible * n_equal_rows
    row["flops"] = {"forward": forward, "both": (1 + BACKWARD) * forward}
    forward_only = torch.no_grad()(partial(inputs.forward, kernel.attend))
    return Ready({"forward": forward_only, "both": partial(inputs.both, kernel.attend)})


def attention_parser() -> ToolParser:
    example = "--kernels 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024"
    parser = benchmark_parser("attention", __doc__, example, PRESETS)
    add = parser.add_argument
    pairs = "mechanism,kernel pairs between spaces (the preset's)"
    add("--kernels", type=mechanisms_with_kernels, metavar="LIST", help=pairs)
    add("--widths", type=numbers, metavar="D,…", help="head widths")
    add("--lengths", type=numbers, metavar="T,…", help="tokens in a sequence")
    return parser


def main(argv: list[str]) -> int:
    options = parse(attention_parser(), argv, PRESETS)
    if options.device.type == "cpu":
        flush_denormals()  # as in a run
    benchmark = Benchmark("attention", argv, options)
    benchmark.record_peaks(DTYPES[options.dtype])
    benchmark.measure(groups_by_shape(options))
    benchmark.record_peaks(DTYPES[options.dtype])
    columns = {
        "error": lambda row: f"{max(row['error'].values()):.0e}",
        "auto": lambda row: "auto" if row["auto"] == row["kernel"] else "",
    }
    benchmark.publish("first", columns)
    return 0
