"""`anlit benchmark attention`: kernels compared over head width, sequence length and documents.

Each mechanism with its kernel is first checked against the formula in float64, output and
gradients. A wrong kernel is not timed. The others take turns in this one process. The last lines
say whether `kernel: auto` takes the fastest kernel.
"""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import torch

from anlit.benchmarks.attention_check import Inputs, fault_of, random_documents, relative_errors
from anlit.benchmarks.harness import Benchmark, CaseGroup, NotTimedError, Ready
from anlit.benchmarks.options import (
    DTYPES,
    MECHANISMS,
    benchmark_parser,
    comma_separated,
    parse,
)
from anlit.benchmarks.tables import Row
from anlit.config.options import ToolParser, numbers
from anlit.nn.kernels import KERNELS, default_kernel, prepare
from anlit.nn.models.runtime import flush_denormals

MEAN_DOCUMENT = 1 / 8
"""Mean length of a document as a share of T. Lengths are exponential: some are a few tokens."""
LAYOUTS = ("dense", "documents")
"""Each row has one document, or many."""
BACKWARD = 2.5
"""FLOPs of the backward pass over those of the forward pass. It has five matrix products, the
forward pass two, because it recomputes the scores."""
PRESETS = {
    "h200": {
        "entrants": "plain,sdpa plain,flash plain,flex plain,triton log-n,flash "
        "scale-invariant,flex scale-invariant,triton scale-invariant-learned,triton",
        "widths": (64, 128),
        "lengths": (2048, 4096, 16384, 65536),
        "rounds": 10,
        "tokens": 16384,
        "d_model": 2048,
        "dtype": "bfloat16",
    },
    "cpu": {
        "entrants": "plain,sdpa plain,blockwise plain,eager alibi,sdpa alibi,blockwise "
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
        if mechanism not in MECHANISMS:
            raise unknown_name(entry, "mechanism", mechanism, MECHANISMS)
        if kernel not in KERNELS:
            raise unknown_name(entry, "kernel", kernel, KERNELS)
        pairs.append((mechanism, kernel))
    return tuple(pairs)


def unknown_name(
    entry: str, kind: str, name: str, choices: Iterable[str]
) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{entry}: no {kind} {name!r}; choose {', '.join(choices)}")


def groups_by_shape(options: argparse.Namespace) -> Iterator[CaseGroup]:
    """Yield a group for each shape. A time limit leaves out the longest, which come last."""
    for length, width, layout in product(options.lengths, options.widths, options.layouts):
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
        for mechanism, kernel in options.entrants:
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


def judge_auto(groups: list[Row]) -> list[str]:
    """Return paragraphs that compare the choices of `kernel: auto` with the times."""
    lines = []
    n_fastest = 0
    for group in groups:
        for mechanism, rows in timed_rows_by_mechanism(group["rows"]).items():
            seconds = {}
            for row in rows:
                seconds[row["kernel"]] = row["seconds"]["both"]["median"]
            choice = rows[0]["auto"]
            lines.append(f"- {group['title']}, {mechanism}: {_verdict(choice, seconds)}")
            n_fastest += choice == _fastest(seconds)
    if not lines:
        return []
    summary = (
        f"`kernel: auto` takes the fastest kernel of those timed in {n_fastest} of {len(lines)} "
        "cases. To take another: `--model.kernel NAME`."
    )
    return [summary, "\n".join(lines)]


def timed_rows_by_mechanism(rows: list[Row]) -> dict[str, list[Row]]:
    rows_by_mechanism: dict[str, list[Row]] = {}
    for row in rows:
        if row["reason"] is None and "seconds" in row:
            rows_by_mechanism.setdefault(row["mechanism"], []).append(row)
    return rows_by_mechanism


def _fastest(seconds: dict[str, float]) -> str:
    return min(seconds, key=seconds.__getitem__)


def _verdict(choice: str, seconds: dict[str, float]) -> str:
    """Describe the choice of `auto` beside the fastest kernel, given seconds by kernel."""
    fastest = _fastest(seconds)
    fastest_time = f"{fastest} takes {1e3 * seconds[fastest]:.3g} ms"
    if choice not in seconds:
        return f"auto takes {choice}, which was not timed; {fastest_time}"
    if choice == fastest:
        return f"auto takes {choice}, the fastest of {len(seconds)}"
    return f"auto takes {choice}, {1e3 * seconds[choice]:.3g} ms; {fastest_time}"


def attention_parser() -> ToolParser:
    example = "--entrants 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024"
    parser = benchmark_parser("attention", __doc__, example, PRESETS)
    add = parser.add_argument
    entrants = "mechanism,kernel pairs between spaces (the preset's)"
    add("--entrants", type=mechanisms_with_kernels, metavar="LIST", help=entrants)
    add("--widths", type=numbers, metavar="D,…", help="head widths")
    add("--lengths", type=numbers, metavar="T,…", help="tokens in a sequence")
    layouts = f"of {', '.join(LAYOUTS)} (both)"
    add("--layouts", type=comma_separated(LAYOUTS), default=LAYOUTS, metavar="A,…", help=layouts)
    return parser


def main(argv: list[str]) -> int:
    options = parse(attention_parser(), argv, PRESETS)
    if options.device.type == "cpu":
        flush_denormals()  # as in a run
    benchmark = Benchmark("attention", argv, options)
    benchmark.record_peaks(DTYPES[options.dtype])
    benchmark.measure(groups_by_shape(options))
    columns = {"error": lambda row: f"{max(row['error'].values()):.0e}"}
    benchmark.publish("first", columns, judge_auto(benchmark.record["groups"]))
    return 0
