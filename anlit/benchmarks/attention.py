"""`anlit benchmark attention`: mechanisms and kernels compared, over head width, length and documents.

For each shape every entrant is first checked against the formula in float64, output and gradients; what is wrong is not
timed. Then they take turns in this one process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from anlit.attention.backends import BACKENDS
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.trial import Inputs, prepare, random_documents, relative_errors, seconds_of_calls, wrong
from anlit.benchmarks.cases import (
    Case,
    Group,
    NotTimedError,
    Ready,
    Row,
    measure,
    megabytes,
    milliseconds,
    of_peak,
    publish,
    quartiles_of,
    ratio_of,
)
from anlit.benchmarks.clock import matrix_peak, peak_bytes, prepare_compiler, seconds_of
from anlit.benchmarks.mechanisms import MECHANISMS
from anlit.benchmarks.options import add_loop_options, check_names, device_of, names, numbers, parser_of
from anlit.benchmarks.record import Record
from anlit.errors import UserError
from anlit.models.runtime import flush_denormals
from anlit.sentences import ToolParser

MEAN_DOCUMENT = 1 / 8
"""Mean length of a document, in T: lengths are drawn from an exponential distribution, some of a few tokens."""
LAYOUTS = ("dense", "documents")
"""Each row one document, or many in each."""
AT_LEAST_SECONDS = 0.02
"""A turn repeats the call until it has about this long; shorter ones would measure the clock."""
BACKWARD = 2.5
"""The backward pass has five matrix products where the forward pass has two: it has to recompute the scores."""
Entrant = tuple[str, str]
"""A mechanism and the kernel that computes it."""


@dataclass(frozen=True)
class Shape:
    """The tensors that all entrants get: batch × heads × length × width."""

    width: int
    length: int
    documents: bool
    heads: int
    batch: int

    @property
    def label(self) -> str:
        layout = "documents" if self.documents else "dense"
        return f"D {self.width}, T {self.length}, {layout}, {self.batch} × {self.heads} heads"

    def packing(self, device: torch.device) -> Documents:
        """One document a row, or many of mixed length, the same for every entrant."""
        mean = MEAN_DOCUMENT * self.length if self.documents else None
        return random_documents(self.batch, self.length, mean, device)


@dataclass(frozen=True)
class Plan:
    """A preset.

    Args:
        entrants: Each a mechanism and a kernel.
        widths: D.
        lengths: T.
        tokens: B·T at least; one sequence where T is more.
        d_model: H·D.
        dtype: Of q, k, v.
        rounds: How often the entrants take turns.
        layouts: Of `LAYOUTS`.
    """

    entrants: tuple[Entrant, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    d_model: int
    dtype: torch.dtype
    rounds: int
    layouts: tuple[str, ...] = LAYOUTS

    def shapes(self) -> list[Shape]:
        """The shapes from the shortest to the longest, so that a time limit leaves out the longest."""
        return [
            Shape(width, length, layout == "documents", max(1, self.d_model // width), max(1, self.tokens // length))
            for length in self.lengths
            for width in self.widths
            for layout in self.layouts
        ]


def entrants(text: str) -> tuple[Entrant, ...]:
    """From `mechanism,kernel mechanism,kernel …`.

    Raises:
        UserError: One of them is not known.
    """
    pairs = tuple((mechanism, kernel) for mechanism, _, kernel in (entry.partition(",") for entry in text.split()))
    for mechanism, kernel in pairs:
        for kind, name, known in (("mechanism", mechanism, MECHANISMS), ("kernel", kernel, BACKENDS)):
            if name not in known:
                raise UserError(f"--entrants {mechanism},{kernel}: no {kind} {name!r}; choose {', '.join(known)}")
    return pairs


PRESETS = {
    "h200": Plan(
        entrants("plain,sdpa plain,flash plain,flex plain,triton log-n,flash scale-invariant,flex "
                 "scale-invariant,triton scale-invariant-learned,triton"),
        (64, 128), (2048, 4096, 16384, 65536), 16384, 2048, torch.bfloat16, 10,
    ),
    "cpu": Plan(
        entrants("plain,sdpa plain,blockwise plain,eager alibi,sdpa alibi,blockwise scale-invariant,blockwise "
                 "scale-invariant,eager"),
        (64,), (256, 1024, 4096), 4096, 128, torch.float32, 7,
    ),
}  # fmt: skip


def group_of(shape: Shape, plan: Plan, device: torch.device) -> Group:
    """All entrants on one shape."""
    build = partial(_build, shape, plan.dtype, device)
    cases = [
        Case(f"{mechanism}, {kernel}", build, {"mechanism": mechanism, "kernel": kernel})
        for mechanism, kernel in plan.entrants
    ]
    return Group(shape.label, cases, {"shape": vars(shape)})


def _build(shape: Shape, dtype: torch.dtype, device: torch.device, rows: list[Row]) -> Ready:
    """Check and prepare the entrant of the last row.

    Raises:
        NotTimedError: The kernel cannot compute it, or computes something else.
    """
    mechanism = MECHANISMS[rows[-1]["mechanism"]].for_layer(shape.heads, shape.width, 0)
    given = Inputs(mechanism, shape.packing(device), shape.batch, shape.heads, shape.heads, shape.width, dtype)
    backend = BACKENDS[rows[-1]["kernel"]]
    attend = backend.attend
    if reason := backend.unsupported_reason(given.mechanism, given.q):
        raise NotTimedError(reason)
    prepare(backend, given.mechanism, given.documents, shape.batch)
    errors = relative_errors(given, attend)
    if reason := wrong(errors, dtype):
        raise NotTimedError(f"it is wrong: {reason}")

    @torch.no_grad()
    def forward_only() -> None:
        given.forward(attend)

    def both() -> None:
        given.both(attend)

    def seconds(call: Callable[[], None], repeats: int = 1) -> float:
        """A GPU's own clock measures what runs on it."""
        return (seconds_of if device.type == "cuda" else seconds_of_calls)(call, device, repeats)

    forward = 4.0 * shape.width * shape.heads * _pairs(shape, given.mechanism)
    calls = {"forward": forward_only, "both": both}
    repeats = {kind: max(1, math.ceil(AT_LEAST_SECONDS / seconds(call))) for kind, call in calls.items()}
    return Ready(
        lambda: {kind: seconds(call, repeats[kind]) for kind, call in calls.items()},
        {"error": errors, "flops": {"forward": forward, "both": (1 + BACKWARD) * forward}},
        lambda: peak_bytes(both, (), device),
    )


def _pairs(shape: Shape, mechanism: Mechanism) -> int:
    """Queries and keys that see each other, over the batch, for one head."""
    seen = shape.packing(torch.device("cpu")).n_visible(torch.float64, mechanism.window).sum()
    return int(seen) * (1 if shape.documents else shape.batch)


def main(argv: list[str]) -> int:
    """`anlit benchmark attention`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("layouts", given.layouts, LAYOUTS)
    changes = {key: value for key in ("widths", "lengths", "rounds", "layouts") if (value := getattr(given, key))}
    if given.entrants:
        changes["entrants"] = entrants(given.entrants)
    plan = replace(PRESETS[given.preset], **changes)
    device = device_of(given)
    if device.type == "cpu":
        flush_denormals()  # as a run does
    prepare_compiler()
    record = Record("attention", argv, given.output, device, settings={**vars(plan), "dtype": str(plan.dtype)})
    peak = matrix_peak(device, plan.dtype)
    record.keep(peak_flops_per_second=peak)
    measure((group_of(shape, plan, device) for shape in plan.shapes()), record, plan.rounds, given.minutes)
    columns = {
        "fwd, ms": milliseconds("forward"),
        "both, ms": milliseconds("both"),
        "quartiles": quartiles_of("both"),
        "of peak": of_peak("both", peak),
        "÷ first (95 %)": ratio_of("both"),
        "MB": megabytes,
        "error": lambda row: f"{max(row['error'].values()):.0e}",
    }
    publish(record, columns)
    return 0


def _parser() -> ToolParser:
    example = "--entrants 'plain,sdpa scale-invariant,eager' --widths 64 --lengths 1024"
    parser = parser_of("attention", __doc__, example, PRESETS)
    add = parser.add_argument
    add("--entrants", metavar="LIST", help="mechanism,kernel pairs between spaces, in place of the preset's")
    add("--widths", type=numbers, metavar="D,…", help="head widths")
    add("--lengths", type=numbers, metavar="T,…", help="tokens in a sequence")
    add("--layouts", type=names, metavar="A,…", help=f"of {', '.join(LAYOUTS)} (both)")
    add_loop_options(parser)
    return parser
