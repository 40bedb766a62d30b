"""`anlit benchmark attention`: mechanisms and kernels compared, over head width, length and documents.

For each shape every entrant is first checked against the formula in float64, output and gradients; what is wrong is not
timed. Then they take turns in this one process. The last lines say whether the kernels that `kernel: auto` takes were
the fastest here.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from anlit.benchmarks.attention_check import Inputs, random_documents, relative_errors, wrong
from anlit.benchmarks.harness import Benchmark, Group, NotTimedError, Ready, Row
from anlit.benchmarks.options import DTYPES, MECHANISMS, names, parse, parser_of
from anlit.config.options import numbers
from anlit.nn.kernels import KERNELS, default_kernel, prepare
from anlit.nn.models.runtime import flush_denormals

MEAN_DOCUMENT = 1 / 8
"""Mean length of a document, in T: lengths are drawn from an exponential distribution, some of a few tokens."""
LAYOUTS = ("dense", "documents")
"""Each row one document, or many in each."""
BACKWARD = 2.5
"""The backward pass has five matrix products where the forward pass has two: it has to recompute the scores."""
PRESETS = {
    "h200": {
        "entrants": "plain,sdpa plain,flash plain,flex plain,triton log-n,flash scale-invariant,flex "
                    "scale-invariant,triton scale-invariant-learned,triton",
        "widths": (64, 128), "lengths": (2048, 4096, 16384, 65536), "rounds": 10,
        "tokens": 16384, "d_model": 2048, "dtype": "bfloat16",
    },
    "cpu": {
        "entrants": "plain,sdpa plain,blockwise plain,eager alibi,sdpa alibi,blockwise scale-invariant,blockwise "
                    "scale-invariant,eager",
        "widths": (64,), "lengths": (256, 1024, 4096), "rounds": 7,
        "tokens": 4096, "d_model": 128, "dtype": "float32",
    },
}  # fmt: skip
"""`tokens` is B·T at least; one sequence where T is more. `d_model` is H·D."""


def entrants(text: str) -> tuple[tuple[str, str], ...]:
    """The mechanisms and kernels in `mechanism,kernel mechanism,kernel …`."""
    pairs = tuple(
        (mechanism, kernel)
        for mechanism, _, kernel in (entry.partition(",") for entry in text.split())
    )
    for mechanism, kernel in pairs:
        for kind, name, known in (
            ("mechanism", mechanism, MECHANISMS),
            ("kernel", kernel, KERNELS),
        ):
            if name not in known:
                choices = ", ".join(known)
                raise argparse.ArgumentTypeError(
                    f"{mechanism},{kernel}: no {kind} {name!r}; choose {choices}"
                )
    return pairs


def groups_of(given: argparse.Namespace) -> Iterator[Group]:
    """All entrants on each shape, from the shortest to the longest, so that a time limit leaves out the longest."""
    for length, width, layout in product(given.lengths, given.widths, given.layouts):
        heads, batch = max(1, given.d_model // width), max(1, given.tokens // length)
        shape = {
            "width": width,
            "length": length,
            "documents": layout == "documents",
            "heads": heads,
            "batch": batch,
        }
        cases = [{"label": f"{mechanism}, {kernel}", "mechanism": mechanism, "kernel": kernel, "shape": shape}
                 for mechanism, kernel in given.entrants]  # fmt: skip
        title = f"D {width}, T {length}, {layout}, {batch} × {heads} heads"
        yield Group(title, partial(_build, DTYPES[given.dtype], given.device), cases)


def _build(dtype: torch.dtype, device: torch.device, row: Row, earlier: list[Row]) -> Ready:
    """Check and prepare an entrant; NotTimedError if the kernel cannot compute it, or computes something else."""
    width, length, is_packed, heads, batch = row["shape"].values()
    mean = MEAN_DOCUMENT * length if is_packed else None
    mechanism, kernel = (
        MECHANISMS[row["mechanism"]].for_layer(heads, width, 0),
        KERNELS[row["kernel"]],
    )
    inputs = Inputs(
        mechanism, random_documents(batch, length, mean, device), batch, heads, heads, width, dtype
    )
    if reason := kernel.unsupported_reason(inputs.mechanism, inputs.q):
        raise NotTimedError(reason)
    row["auto"] = default_kernel(inputs.mechanism, device.type, is_packed, inputs.q)
    prepare(kernel, inputs.mechanism, inputs.documents, batch)
    row["error"] = relative_errors(inputs, kernel.attend)
    if reason := wrong(row["error"], dtype):
        raise NotTimedError(f"it is wrong: {reason}")
    on_host = random_documents(batch, length, mean, torch.device("cpu"))
    visible = int(
        on_host.n_visible(torch.float64, inputs.mechanism.window).sum()
    )  # of a row if all are alike
    forward = 4.0 * width * heads * visible * (1 if is_packed else batch)
    row["flops"] = {"forward": forward, "both": (1 + BACKWARD) * forward}
    forward_only = torch.no_grad()(lambda: inputs.forward(kernel.attend))
    return Ready({"forward": forward_only, "both": lambda: inputs.both(kernel.attend)})


def judge_table(groups: list[Row]) -> list[str]:
    """Paragraphs that hold the table of `kernel: auto` against the times, forward and backward."""
    lines = []
    n_fastest = 0
    for group in groups:
        rows_by_mechanism: dict[str, list[Row]] = {}
        for row in group["rows"]:
            if row["reason"] is None and "seconds" in row:
                rows_by_mechanism.setdefault(row["mechanism"], []).append(row)
        for mechanism, rows in rows_by_mechanism.items():
            line, is_fastest = _judge_choice(rows)
            n_fastest += is_fastest
            lines.append(f"- {group['title']}, {mechanism}: {line}")
    if not lines:
        return []
    summary = (
        f"`kernel: auto` takes the fastest kernel of those timed in {n_fastest} of {len(lines)} cases. "
        "To take another: `--model.kernel NAME`."
    )
    return [summary, "\n".join(lines)]


def _judge_choice(rows: list[Row]) -> tuple[str, bool]:
    """What `auto` takes for one mechanism and shape, and whether it is the fastest of the rows."""
    seconds = {row["kernel"]: row["seconds"]["both"]["median"] for row in rows}
    fastest = min(seconds, key=seconds.__getitem__)
    choice = rows[0]["auto"]
    best = f"{fastest} takes {1e3 * seconds[fastest]:.3g} ms"
    if choice not in seconds:
        return f"auto takes {choice}, which was not timed; {best}", False
    if choice == fastest:
        return f"auto takes {choice}, the fastest of {len(seconds)}", True
    return f"auto takes {choice}, {1e3 * seconds[choice]:.3g} ms; {best}", False


def main(argv: list[str]) -> int:
    example = "--entrants 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024"
    parser = parser_of("attention", __doc__, example, PRESETS)
    add = parser.add_argument
    add(
        "--entrants",
        type=entrants,
        metavar="LIST",
        help="mechanism,kernel pairs between spaces (the preset's)",
    )
    add("--widths", type=numbers, metavar="D,…", help="head widths")
    add("--lengths", type=numbers, metavar="T,…", help="tokens in a sequence")
    add(
        "--layouts",
        type=names(LAYOUTS),
        default=LAYOUTS,
        metavar="A,…",
        help=f"of {', '.join(LAYOUTS)} (both)",
    )
    given = parse(parser, argv, PRESETS)
    if given.device.type == "cpu":
        flush_denormals()  # as a run does
    benchmark = Benchmark("attention", argv, given)
    benchmark.keep_peaks(DTYPES[given.dtype])
    benchmark.measure(groups_of(given))
    errors = {"error": lambda row: f"{max(row['error'].values()):.0e}"}
    benchmark.publish("first", errors, judge_table(benchmark.record["groups"]))
    return 0
