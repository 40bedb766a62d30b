"""`anlit benchmark step`: training steps of our models and of other libraries.

Each variant is built, checked (finite losses, the same eager and compiled; a peer has as many parameters and FLOPs) and
warmed up. Then all take turns, and ratios are paired by round. Our step is Lightning's, with optimizer, clipping and
restoration of norms, without loader, callbacks and logging. A peer's step is the plain loop: autocast, cross-entropy,
clipping to 1.0, fused AdamW. Each row is one document, as for the peers, unless --documents is given. With --lengths
the sequences of a batch get longer and fewer, so that only attention grows.
"""

import argparse
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.attention.backends import BACKENDS
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
from anlit.benchmarks.our_step import MODELS, OurStep
from anlit.benchmarks.peers import COMPILED, PEERS, PeerStep
from anlit.benchmarks.profile import kernel_table, kernels_of
from anlit.benchmarks.record import Record
from anlit.benchmarks.size import Size, add_size_options, changed_size
from anlit.errors import UserError
from anlit.models.runtime import Runtime

BASE = "GPT"
"""The model that the others are compared with."""
NAMES = {"GPT": "GPT+", "transformers": "Qwen3"}
"""Names of models in tables, if they differ."""
HOW = {"no": "eager", "blocks": "compiled", "whole": "compiled whole", "float8": "compiled, float8"}
OURS_COMPILED = ("no", "blocks", "float8")
CHECKED_STEPS, WARM_UP = 3, 2
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
"""The largest relative difference between the first losses of one architecture, eager or compiled."""
FLOAT8_TOLERANCE = 0.02


@dataclass(frozen=True)
class Plan:
    """The variants to time.

    Args:
        size: The shapes of the model and the batch.
        models, peers: Our models and those of other libraries.
        compiled: How ours are run: no, blocks, float8 (compiled blocks with products in float8).
        peers_compiled: How the peers are run: no, whole.
        mechanisms: The attention mechanisms of our models.
        groups: Numbers of query heads that share a key head, in our models.
        backends: The back ends of attention in our models.
        lengths: Lengths of sequences, a table each; none for the size's own.
        repeats: Steps in a turn.
    """

    size: Size
    models: tuple[str, ...] = tuple(MODELS)
    peers: tuple[str, ...] = tuple(PEERS)
    compiled: tuple[str, ...] = ("no", "blocks")
    peers_compiled: tuple[str, ...] = COMPILED
    mechanisms: tuple[str, ...] = ("plain",)
    groups: tuple[int, ...] = (1,)
    backends: tuple[str, ...] = ("auto",)
    lengths: tuple[int, ...] = ()
    rounds: int = 15
    repeats: int = 1


def _on_gpu(d_model: int, n_layers: int, n_heads: int, peers: tuple[str, ...] = tuple(PEERS)) -> Plan:
    size = Size(d_model, n_layers, n_heads, 50_304, 2048, 8, torch.bfloat16)
    return Plan(size, peers=peers, compiled=("blocks",), peers_compiled=("whole",), repeats=5, rounds=10)


PRESETS = {
    "cpu": Plan(Size(256, 6, 4, 4096, 256, 8, torch.float32)),
    "h200": _on_gpu(1024, 24, 16),
    "h200-125m": _on_gpu(512, 18, 8),
    # Weights and optimizer of each take 17 GB, and what a step keeps about 50 GB: there is no room for peers.
    "h200-1b": _on_gpu(1280, 36, 20, peers=()),
}


def group_of(
    plan: Plan, size: Size, device: torch.device, documents: bool, title: str, traces: Path | None = None
) -> Group:
    """Our variants, eager ones first, then the peers'. Each is compared with GPT+ in the same mode.

    float8 and a peer that is compiled as a whole are compared with GPT+ with compiled blocks.
    """

    def case(model: str, compiled: str, mechanism: str = "plain", backend: str = "auto", group: int = 1) -> Case:
        usual = ("plain", "auto")
        name = [NAMES.get(model, model), *(part for part in (mechanism, backend) if part not in usual)]
        name += [] if group == 1 else [f"groups of {group}"]
        build = partial(_build, size, device, documents, plan.repeats, traces)
        facts = {"model": model, "mechanism": mechanism, "backend": backend, "compiled": compiled, "group": group}
        base = f"{NAMES[BASE]} {HOW['no' if compiled == 'no' else 'blocks']}"
        return Case(" ".join((*name, HOW[compiled])), build, facts, base)

    ours = [case(model, how, mechanism, backend, group) for how in plan.compiled for mechanism in plan.mechanisms
            for backend in plan.backends for group in plan.groups for model in plan.models]  # fmt: skip
    return Group(title, ours + [case(peer, how) for peer in plan.peers for how in plan.peers_compiled])


def _build(
    size: Size, device: torch.device, documents: bool, repeats: int, traces: Path | None, rows: list[Row]
) -> Ready:
    """The variant of the last row after its first steps; profiled, if there is a folder for traces.

    Raises:
        NotTimedError: It computes something else.
    """
    row = rows[-1]
    model, compiled = row["model"], row["compiled"]
    step: OurStep | PeerStep
    if model in PEERS:
        step = PeerStep(model, size, device, compiled)
    else:
        runtime = Runtime(compile=compiled != "no", float8="tensorwise" if compiled == "float8" else None)
        mechanism = MECHANISMS[row["mechanism"]]
        step = OurStep(model, size, device, runtime, mechanism, documents, row["group"], row["backend"])
    row |= facts_of(step)
    row["losses"] = [step.train().item() for _ in range(CHECKED_STEPS)]
    if reason := reason_against(row, rows, size):
        raise NotTimedError(reason)
    seconds_of(step.train, device, WARM_UP)
    if traces is not None:
        row["kernels"] = kernels_of(step.train, traces / f"{row['label'].replace(' ', '-')}.trace.json.gz")
    return Ready(
        lambda: {"train": seconds_of(step.train, device, repeats)},
        {"flops": {"train": row["flops_per_token"] * size.tokens}},
        lambda: peak_bytes(step.train, _kept(step), device),
    )


def facts_of(step: OurStep | PeerStep) -> dict[str, float]:
    """The number of parameters, and FLOPs of a training step per token."""
    n_parameters = sum(parameter.numel() for parameter in step.model.parameters())
    return {"parameters": n_parameters, "flops_per_token": step.flops_per_token()}


def _kept(step: OurStep | PeerStep) -> Iterator[Tensor]:
    """The tensors that stay between steps: parameters, gradients, optimizer state."""
    for parameter in step.model.parameters():
        yield from (part for part in (parameter, parameter.grad) if part is not None)
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def reason_against(row: Row, rows: list[Row], size: Size) -> str | None:
    """Why a variant's numbers are wrong; None if they are right.

    Its first losses must equal those of the variants of the same architecture before it. A peer must have the FLOPs and
    parameters of our GPT, and an initial loss near ln V.
    """
    losses = row["losses"]
    if not all(math.isfinite(loss) for loss in losses):
        return f"its losses are {losses}"
    if row["model"] in PEERS:
        start = math.log(size.vocab_size)
        if abs(losses[0] / start - 1) > 0.1:
            return f"it is wrong: its first loss is {losses[0]:.3f}, not about {start:.2f}"
        ours = next((other for other in rows if other["model"] == BASE and other["reason"] is None), None)
        if ours is not None and (reason := other_work(row, ours)):
            return reason
    same = ("model", "mechanism", "group")
    first = next(other for other in rows if all(other[key] == row[key] for key in same) and other.get("losses"))
    allowed = FLOAT8_TOLERANCE if row["compiled"] == "float8" else TOLERANCE[size.dtype]
    if any(abs(mine / its - 1) > allowed for mine, its in zip(losses, first["losses"], strict=True)):
        return f"it is wrong: its first losses are {losses}, those of {first['label']} {first['losses']}"
    return None


def other_work(row: Row, ours: Row) -> str | None:
    """Why a peer's step is other work than ours; None if it is the same. Only some count gains as parameters."""
    for what, allowed in (("flops_per_token", 1e-9), ("parameters", 0.002)):
        if abs(row[what] / ours[what] - 1) > allowed:
            return f"it does other work: {what} {row[what]:.6g}, ours {ours[what]:.6g}"
    return None


def main(argv: list[str]) -> int:
    """`anlit benchmark step`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    plan = changed_plan(PRESETS[given.preset], given)
    device = device_of(given)
    settings = {**vars(plan), "size": plan.size.as_json(), "documents": given.documents}
    record = Record("step", argv, given.output, device, f"step-{given.preset}", settings=settings)
    prepare_compiler()
    peak = matrix_peak(device, plan.size.dtype)
    record.keep(peak_flops_per_second=peak)
    sizes = [plan.size.at_length(length) for length in plan.lengths] or [plan.size]
    traces = Path(given.output) if given.profile else None
    measure(
        (group_of(plan, size, device, given.documents, f"{size.title}; peak {peak / 1e12:.3g} TFLOP/s", traces)
         for size in sizes),
        record, plan.rounds, given.minutes,
    )  # fmt: skip
    kernels = [kernel_table(row) for group in record.values["groups"] for row in group["rows"] if "kernels" in row]
    publish(record, {"step, ms": milliseconds("train"), "quartiles": quartiles_of("train"),
                     "MFU": of_peak("train", peak), "÷ GPT+ (95 %)": ratio_of("train"), "MB": megabytes},
            kernels)  # fmt: skip
    return 0


def changed_plan(plan: Plan, given: argparse.Namespace) -> Plan:
    """The preset with the given options in place of its own. Without --peers it has those that are installed.

    Raises:
        UserError: A name is not known, a peer is not installed, or the heads cannot be shared so.
    """
    allowed: dict[str, Collection[str]] = {
        "models": MODELS, "compiled": OURS_COMPILED, "mechanisms": MECHANISMS, "backends": ("auto", *BACKENDS),
        "peers": ("none", *PEERS), "peers_compiled": COMPILED,
    }  # fmt: skip
    for key, known in allowed.items():
        check_names(key, getattr(given, key), known)
    keys = (*allowed, "groups", "lengths", "rounds")
    changes: dict[str, Any] = {key: value for key in keys if (value := getattr(given, key))}
    changes["size"] = changed_size(plan.size, given)
    changes["peers"] = tuple(peer for peer in given.peers or plan.peers if peer != "none" and find_spec(peer))
    if missing := set(given.peers or ()) - {"none", *changes["peers"]}:
        raise UserError(f"--peers {missing.pop()} is not installed: install it, or leave it out")
    if any(group < 1 or changes["size"].n_heads % group for group in given.groups or ()):
        raise UserError(f"--groups must be divisors of the {changes['size'].n_heads} heads")
    return replace(plan, **changes)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("step", __doc__, "--preset cpu --models GPT,anGPT", PRESETS)
    add = parser.add_argument
    add("--models", type=names, metavar="A,…", help=f"of {', '.join(MODELS)}")
    add("--mechanisms", type=names, metavar="A,…", help=f"of {', '.join(MECHANISMS)}")
    add("--groups", type=numbers, metavar="N,…", help="query heads that share a key head in our models (1)")
    add("--backends", type=names, metavar="A,…", help=f"of auto, {', '.join(BACKENDS)}, for our attention (auto)")
    add("--compiled", type=names, metavar="A,…", help="of no, blocks, float8, for our models")
    add("--peers", type=names, metavar="A,…", help=f"of {', '.join(PEERS)}, or none (default: the installed ones)")
    add("--peers_compiled", type=names, metavar="A,…", help=f"of {', '.join(COMPILED)}, for the peers")
    add("--lengths", type=numbers, metavar="T,…", help="several lengths, with as many tokens in a batch")
    add("--documents", action="store_true", help="pack documents into our batches and mask them")
    add("--profile", action="store_true", help="also where each variant's step spends its time, and a trace")
    add_size_options(parser)
    add_loop_options(parser)
    return parser
