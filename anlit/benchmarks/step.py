"""`anlit benchmark step`: training steps of our models and of other libraries.

Each variant is built, checked and warmed up. Its losses must be finite and the same eager and
compiled. A peer must have as many parameters and FLOPs as GPT+. Then all take turns, and ratios are
paired by round. Our step is Lightning's, with optimizer, clipping and restoration of norms, without
loader, callbacks and logging. A peer's step is the plain loop: autocast, cross-entropy, clipping to
1.0, fused AdamW. Each row is one document, as for the peers, unless --documents is given. With
--lengths the sequences of a batch get longer and fewer, so that only attention grows.
"""

import argparse
import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from anlit.benchmarks.harness import Benchmark, CaseGroup, NotTimedError, Ready
from anlit.benchmarks.options import (
    MECHANISMS,
    OF_PRESET,
    Size,
    add_size_options,
    benchmark_parser,
    comma_separated,
    parse,
)
from anlit.benchmarks.tables import Row
from anlit.benchmarks.training_step import (
    MODELS,
    PEER_COMPILATIONS,
    PEERS,
    Step,
    our_step,
    peer_step,
)
from anlit.config.options import ToolParser, numbers
from anlit.errors import UserError
from anlit.nn.kernels import KERNELS
from anlit.nn.models.runtime import Runtime
from anlit.packages import is_installed

BASE = "GPT"
"""The model whose times are the divisor."""
LABELS = {"GPT": "GPT+", "transformers": "Qwen3"}
"""Names of models in tables, if they differ from the options."""
MODES = {
    "no": "eager",
    "blocks": "compiled",
    "whole": "compiled whole",
    "float8": "compiled, float8",
}
"""Names of compilations in tables."""
OUR_COMPILATIONS = ("no", "blocks", "float8")
CHECKED_STEPS = 3
WARM_UP_STEPS = 2
LOSS_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
"""The largest relative difference between first losses of an architecture, eager or compiled."""
FLOAT8_TOLERANCE = 0.02
START_TOLERANCE = 0.1
"""The largest relative difference of a peer's initial loss from ln V."""
WORK_TOLERANCE = {"flops_per_token": 1e-9, "parameters": 0.002}
"""The largest relative difference of a peer's work from GPT+'s. Not every peer counts gains."""
PROFILED_STEPS = 3
SHOWN_KERNELS = 40

INSTALLED = tuple(peer for peer in PEERS if is_installed(peer))
GPU_PRESET = {
    "vocab_size": 50_304,
    "length": 2048,
    "batch": 8,
    "dtype": "bfloat16",
    "peers": INSTALLED,
    "compiled": ("blocks",),
    "peers_compiled": ("whole",),
    "rounds": 8,
}
CPU_PRESET = {
    "d_model": 256,
    "n_layers": 6,
    "n_heads": 4,
    "vocab_size": 4096,
    "length": 256,
    "batch": 8,
    "dtype": "float32",
    "peers": INSTALLED,
    "compiled": ("no", "blocks"),
    "peers_compiled": PEER_COMPILATIONS,
    "rounds": 15,
}
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": CPU_PRESET,
    "h200": GPU_PRESET | {"d_model": 1024, "n_layers": 24, "n_heads": 16},
    "h200-125m": GPU_PRESET | {"d_model": 512, "n_layers": 18, "n_heads": 8},
    # Each model's weights and optimizer take 17 GB, and a step's activations about 50 GB: peers do
    # not fit.
    "h200-1b": GPU_PRESET | {"d_model": 1280, "n_layers": 36, "n_heads": 20, "peers": ()},
}


def step_group(options: argparse.Namespace, size: Size) -> CaseGroup:
    """Return our variants, the eager ones first, and then the peers."""
    cases = []
    for compiled, mechanism, kernel, group, model in product(
        options.compiled, options.mechanisms, options.kernels, options.groups, options.models
    ):
        cases.append(make_case(model, compiled, mechanism, kernel, group))
    for peer, compiled in product(options.peers, options.peers_compiled):
        cases.append(make_case(peer, compiled))
    return CaseGroup(str(size), partial(_build, options, size), cases)


def make_case(
    model: str, compiled: str, mechanism: str = "plain", kernel: str = "auto", group: int = 1
) -> Row:
    """Return the row of a variant, with its label and its base.

    The base is GPT+ in the same mode. For float8 and for a peer compiled as a whole it is GPT+ with
    compiled blocks.
    """
    label = [LABELS.get(model, model)]
    if mechanism != "plain":
        label.append(mechanism)
    if kernel != "auto":
        label.append(kernel)
    if group != 1:
        label.append(f"groups of {group}")
    label.append(MODES[compiled])
    base_mode = MODES["no" if compiled == "no" else "blocks"]
    return {
        "label": " ".join(label),
        "model": model,
        "mechanism": mechanism,
        "kernel": kernel,
        "compiled": compiled,
        "group": group,
        "base": f"{LABELS[BASE]} {base_mode}",
    }


def _build(options: argparse.Namespace, size: Size, row: Row, earlier_rows: list[Row]) -> Ready:
    """Build a variant and check its first steps. NotTimedError if it computes something else."""
    step = _make_step(options, size, row)
    row["parameters"] = sum(parameter.numel() for parameter in step.model.parameters())
    row["flops_per_token"] = step.flops_per_token
    row["flops"] = {"train": step.flops_per_token * size.batch * size.length}
    row["losses"] = [step.train().item() for _ in range(CHECKED_STEPS)]
    if fault := fault_of_row(row, earlier_rows, size):
        raise NotTimedError(fault)
    step.stop_learning()
    for _ in range(WARM_UP_STEPS):
        step.train()
    name = row["label"].replace(" ", "-").replace("+", "plus")
    trace = Path(options.output) / f"{name}.trace.json.gz"
    ready = Ready(
        {"train": step.train},
        partial(_permanent_tensors, step),
        turn_seconds=0,
        facts_after=partial(facts_after_times, step, trace if options.profile else None),
    )
    return ready.of_steps(options.device)


def _make_step(options: argparse.Namespace, size: Size, row: Row) -> Step:
    model = row["model"]
    compiled = row["compiled"]
    if model in PEERS:
        return peer_step(model, size, options.device, compiled)
    runtime = Runtime(
        compile=compiled != "no", float8="tensorwise" if compiled == "float8" else None
    )
    return our_step(
        model,
        size,
        options.device,
        runtime,
        MECHANISMS[row["mechanism"]],
        options.documents,
        row["group"],
        row["kernel"],
    )


def _permanent_tensors(step: Step) -> Iterator[Tensor]:
    """Yield the tensors that exist between steps: parameters, gradients, optimizer state."""
    for parameter in step.model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for state in step.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value


def fault_of_row(row: Row, earlier_rows: list[Row], size: Size) -> str | None:
    """Return why a variant's numbers are wrong, None if they are right.

    Its first losses must equal the first earlier losses of the same architecture. A peer must have
    the FLOPs and parameters of our GPT+, and an initial loss near ln V.
    """
    losses = row["losses"]
    if not all(map(math.isfinite, losses)):
        return f"its losses are {losses}"
    if row["model"] in PEERS and (fault := _fault_of_peer(row, earlier_rows, size)):
        return fault
    reference = _first_of_same_architecture(earlier_rows, row)
    is_float8 = row["compiled"] == "float8"
    tolerance = FLOAT8_TOLERANCE if is_float8 else LOSS_TOLERANCE[size.torch_dtype]
    for loss, expected in zip(losses, reference["losses"], strict=True):
        if abs(loss / expected - 1) > tolerance:
            return (
                f"it is wrong: its first losses are {losses}, not {reference['losses']} as of "
                f"{reference['label']}"
            )
    return None


def _fault_of_peer(row: Row, earlier_rows: list[Row], size: Size) -> str | None:
    loss = row["losses"][0]
    expected_loss = math.log(size.vocab_size)
    if abs(loss / expected_loss - 1) > START_TOLERANCE:
        return f"it is wrong: its first loss is {loss:.3f}, not about {expected_loss:.2f}"
    for base in earlier_rows:
        if base["model"] == BASE and base["reason"] is None:
            return _difference_in_work(row, base)
    return None


def _difference_in_work(row: Row, base: Row) -> str | None:
    for quantity, tolerance in WORK_TOLERANCE.items():
        if abs(row[quantity] / base[quantity] - 1) > tolerance:
            numbers = f"{row[quantity]:.6g}, ours {base[quantity]:.6g}"
            return f"it does other work: {quantity} {numbers}"
    return None


def _first_of_same_architecture(rows: list[Row], variant: Row) -> Row:
    """Return the first row with the variant's model, mechanism and group, else the variant."""
    for row in rows:
        is_same = all(row[key] == variant[key] for key in ("model", "mechanism", "group"))
        if is_same and "losses" in row:
            return row
    return variant


def facts_after_times(step: Step, trace: Path | None) -> Row:
    """Return the last loss, and a profile if there is a file for its trace.

    NotTimedError if the loss is not finite: the times are not those of training.
    """
    last_loss = step.train().item()
    if not math.isfinite(last_loss):
        raise NotTimedError(f"its loss became {last_loss} while it was timed")
    facts = {"last_loss": last_loss}
    return facts if trace is None else facts | profile_step(step.train, trace)


def profile_step(step: Callable[[], Any], trace: Path) -> Row:
    """Write a trace for Perfetto. The row gets torch's table of kernels, on a CPU of operators."""
    with profile(acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    profiler.export_chrome_trace(str(trace))
    order = f"self_{'device' if torch.cuda.is_available() else 'cpu'}_time_total"
    averages = profiler.key_averages()
    table = averages.table(order, row_limit=SHOWN_KERNELS, max_name_column_width=90)
    return {"profile": table}


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    size = Size.from_options(options)
    sizes = [size.at_length(length) for length in options.lengths] or [size]
    benchmark = Benchmark("step", argv, options, f"step-{options.preset}")
    benchmark.record_peaks(size.torch_dtype)
    benchmark.measure(step_group(options, size) for size in sizes)
    benchmark.record_peaks(size.torch_dtype)
    benchmark.publish(LABELS[BASE], notes=profile_notes(benchmark.record["groups"]))
    return 0


def profile_notes(groups: list[Row]) -> list[str]:
    notes = []
    for group in groups:
        for row in group["rows"]:
            if "profile" in row:
                table = f"```\n{row['profile']}\n```"
                notes.append(f"{row['label']}, {PROFILED_STEPS} steps:\n\n{table}")
    return notes


def step_parser() -> ToolParser:
    parser = benchmark_parser("step", __doc__, "--preset cpu --models GPT,anGPT", PRESETS)
    add = parser.add_argument

    def add_names(
        option: str, choices: Collection[str], use: str, default: tuple[str, ...] | None = None
    ) -> None:
        kind = comma_separated(choices)
        text = f"of {', '.join(choices)}{use}"
        add(option, type=kind, metavar="A,…", help=text, default=default)

    add_names("--models", (*MODELS, "none"), "", tuple(MODELS))
    add_names("--mechanisms", MECHANISMS, " (plain)", ("plain",))
    groups = "query heads that share a key head in ours (1)"
    add("--groups", type=numbers, default=(1,), metavar="N,…", help=groups)
    add_names("--kernels", ("auto", *KERNELS), ", for our attention (auto)", ("auto",))
    add_names("--compiled", OUR_COMPILATIONS, ", for our models")
    add_names("--peers", (*PEERS, "none"), " (default: the installed ones)")
    add_names("--peers_compiled", PEER_COMPILATIONS, ", for the peers")
    lengths = "several lengths, with as many tokens in a batch"
    add("--lengths", type=numbers, default=(), metavar="T,…", help=lengths)
    add("--documents", action="store_true", help="pack documents into our batches and mask them")
    add("--profile", action="store_true", help="also a table of each step's kernels, and a trace")
    add_size_options(parser, OF_PRESET, dtype=OF_PRESET)
    return parser


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Parse the options.

    Raises:
        UserError: An option is wrong, a peer is not installed, or groups do not divide the heads.
    """
    options = parse(step_parser(), argv, PRESETS)
    options.models = tuple(model for model in options.models if model != "none")
    options.peers = tuple(peer for peer in options.peers if peer != "none")
    for peer in options.peers:
        if peer not in INSTALLED:
            raise UserError(f"--peers {peer} is not installed: install it, or leave it out")
    if any(options.n_heads % group for group in options.groups):
        raise UserError(f"--groups must be divisors of the {options.n_heads} heads")
    return options
