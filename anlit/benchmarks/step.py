"""`anlit benchmark step`: training steps of our models and of other libraries.

Each variant is built, checked (finite losses, the same eager and compiled; a peer has as many parameters and FLOPs) and
warmed up. Then all take turns, and ratios are paired by round. Our step is Lightning's, with optimizer, clipping and
restoration of norms, without loader, callbacks and logging. A peer's step is the plain loop: autocast, cross-entropy,
clipping to 1.0, fused AdamW. Each row is one document, as for the peers, unless --documents is given. With --lengths
the sequences of a batch get longer and fewer, so that only attention grows.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile

from anlit.benchmarks.harness import Benchmark, Group, NotTimedError, Ready, Row
from anlit.benchmarks.options import MECHANISMS, Size, add_size_options, names, parse, parser_of
from anlit.benchmarks.training_step import COMPILED, MODELS, PEERS, Step, our_step, peer_step
from anlit.config.options import numbers
from anlit.errors import UserError
from anlit.nn.kernels import KERNELS
from anlit.nn.models.runtime import Runtime

BASE = "GPT"
"""The model that the others are compared with."""
NAMES = {"GPT": "GPT+", "transformers": "Qwen3"}
"""Names of models in tables, if they differ."""
HOW = {"no": "eager", "blocks": "compiled", "whole": "compiled whole", "float8": "compiled, float8"}
OURS_COMPILED = ("no", "blocks", "float8")
CHECKED_STEPS, WARM_UP = 3, 2
GPU_TURN_SECONDS = 0.5
"""Several steps in a turn, so that the host is ahead of the GPU as in a run."""
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1e-2}
"""The largest relative difference between the first losses of one architecture, eager or compiled."""
FLOAT8_TOLERANCE = 0.02
PROFILED_STEPS, SHOWN_KERNELS = 3, 40

INSTALLED = tuple(peer for peer in PEERS if find_spec(peer))
ON_GPU = {
    "vocab_size": 50_304, "length": 2048, "batch": 8, "dtype": "bfloat16", "peers": INSTALLED,
    "compiled": ("blocks",), "peers_compiled": ("whole",), "rounds": 10,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "cpu": {
        "d_model": 256, "n_layers": 6, "n_heads": 4, "vocab_size": 4096, "length": 256, "batch": 8, "dtype": "float32",
        "peers": INSTALLED, "compiled": ("no", "blocks"), "peers_compiled": COMPILED, "rounds": 15,
    },
    "h200": ON_GPU | {"d_model": 1024, "n_layers": 24, "n_heads": 16},
    "h200-125m": ON_GPU | {"d_model": 512, "n_layers": 18, "n_heads": 8},
    # Weights and optimizer of each take 17 GB, and what a step keeps about 50 GB: there is no room for peers.
    "h200-1b": ON_GPU | {"d_model": 1280, "n_layers": 36, "n_heads": 20, "peers": ()},
}  # fmt: skip


def group_of(given: argparse.Namespace, size: Size) -> Group:
    """Our variants, eager ones first, then the peers'. Each is compared with GPT+ in the same mode.

    float8 and a peer that is compiled as a whole are compared with GPT+ with compiled blocks.
    """

    def case(
        model: str, compiled: str, mechanism: str = "plain", kernel: str = "auto", group: int = 1
    ) -> Row:
        name = [
            NAMES.get(model, model),
            *(part for part in (mechanism, kernel) if part not in ("plain", "auto")),
        ]
        name += [] if group == 1 else [f"groups of {group}"]
        facts = {
            "model": model,
            "mechanism": mechanism,
            "kernel": kernel,
            "compiled": compiled,
            "group": group,
        }
        base = f"{NAMES[BASE]} {HOW['no' if compiled == 'no' else 'blocks']}"
        return {"label": " ".join((*name, HOW[compiled])), **facts, "base": base}

    ours = [case(model, how, mechanism, kernel, group) for how in given.compiled for mechanism in given.mechanisms
            for kernel in given.kernels for group in given.groups for model in given.models]  # fmt: skip
    peers = [case(peer, how) for peer in given.peers for how in given.peers_compiled]
    return Group(str(size), partial(_build, given, size), ours + peers)


def _build(given: argparse.Namespace, size: Size, row: Row, earlier: list[Row]) -> Ready:
    """A variant after its first steps, profiled with --profile; NotTimedError if it computes something else."""
    model, compiled, device = row["model"], row["compiled"], given.device
    if model in PEERS:
        step = peer_step(model, size, device, compiled)
    else:
        runtime = Runtime(
            compile=compiled != "no", float8="tensorwise" if compiled == "float8" else None
        )
        mechanism = MECHANISMS[row["mechanism"]]
        step = our_step(
            model, size, device, runtime, mechanism, given.documents, row["group"], row["kernel"]
        )
    row["parameters"] = sum(parameter.numel() for parameter in step.model.parameters())
    row["flops_per_token"] = step.flops_per_token
    row["flops"] = {"train": step.flops_per_token * size.batch * size.length}
    row["losses"] = [step.train().item() for _ in range(CHECKED_STEPS)]
    if reason := skip_reason(row, earlier, size):
        raise NotTimedError(reason)
    for _ in range(WARM_UP):
        step.train()
    if given.profile:
        trace = Path(given.output) / f"{row['label'].replace(' ', '-')}.trace.json.gz"
        row["profile"] = profile_of(step.train, trace)
    return Ready(
        {"train": step.train},
        partial(_kept, step),
        GPU_TURN_SECONDS if device.type == "cuda" else 0,
    )


def _kept(step: Step) -> Iterator[Tensor]:
    """The tensors that stay between steps: parameters, gradients, optimizer state."""
    for parameter in step.model.parameters():
        yield from (part for part in (parameter, parameter.grad) if part is not None)
    for state in step.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def skip_reason(row: Row, earlier: list[Row], size: Size) -> str | None:
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
        ours = next(
            (other for other in earlier if other["model"] == BASE and other["reason"] is None), None
        )
        for what, allowed in (
            ("flops_per_token", 1e-9),
            ("parameters", 0.002),
        ):  # only some count gains
            if ours is not None and abs(row[what] / ours[what] - 1) > allowed:
                return f"it does other work: {what} {row[what]:.6g}, ours {ours[what]:.6g}"
    same = ("model", "mechanism", "group")
    first = next(
        (
            other
            for other in earlier
            if all(other[key] == row[key] for key in same) and "losses" in other
        ),
        row,
    )
    allowed = FLOAT8_TOLERANCE if row["compiled"] == "float8" else TOLERANCE[size.torch_dtype]
    if any(
        abs(mine / its - 1) > allowed for mine, its in zip(losses, first["losses"], strict=True)
    ):
        return f"it is wrong: its first losses are {losses}, those of {first['label']} {first['losses']}"
    return None


def profile_of(step: Callable[[], Any], trace: Path) -> str:
    """torch's table of the kernels, or on a CPU operators, that a step spends its time in; Perfetto shows `trace`."""
    with profile() as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    profiler.export_chrome_trace(str(trace))
    order = f"self_{'device' if torch.cuda.is_available() else 'cpu'}_time_total"
    return profiler.key_averages().table(order, row_limit=SHOWN_KERNELS, max_name_column_width=90)


def main(argv: list[str]) -> int:
    given = options(argv)
    size = Size.of(given)
    benchmark = Benchmark("step", argv, given, f"step-{given.preset}")
    benchmark.keep_peaks(size.torch_dtype)
    sizes = [size.at_length(length) for length in given.lengths] or [size]
    benchmark.measure(group_of(given, size) for size in sizes)
    rows = [row for group in benchmark.record["groups"] for row in group["rows"]]
    benchmark.publish(NAMES[BASE], notes=[
        f"{row['label']}, {PROFILED_STEPS} steps:\n\n```\n{row['profile']}\n```" for row in rows if "profile" in row
    ])  # fmt: skip
    return 0


def options(argv: list[str]) -> argparse.Namespace:
    """The options; UserError if one is wrong, a peer is not installed, or the heads cannot be shared so."""
    parser = parser_of("step", __doc__, "--preset cpu --models GPT,anGPT", PRESETS)

    def of(known: Any, more: str, default: tuple[str, ...] | None = None) -> dict[str, Any]:
        return {
            "type": names(known),
            "metavar": "A,…",
            "help": f"of {', '.join(known)}{more}",
            "default": default,
        }

    add = parser.add_argument
    add("--models", **of((*MODELS, "none"), "", tuple(MODELS)))
    add("--mechanisms", **of(MECHANISMS, " (plain)", ("plain",)))
    add(
        "--groups",
        type=numbers,
        default=(1,),
        metavar="N,…",
        help="query heads that share a key head in ours (1)",
    )
    add("--kernels", **of(("auto", *KERNELS), ", for our attention (auto)", ("auto",)))
    add("--compiled", **of(OURS_COMPILED, ", for our models"))
    add("--peers", **of((*PEERS, "none"), " (default: the installed ones)"))
    add("--peers_compiled", **of(COMPILED, ", for the peers"))
    add(
        "--lengths",
        type=numbers,
        default=(),
        metavar="T,…",
        help="several lengths, with as many tokens in a batch",
    )
    add("--documents", action="store_true", help="pack documents into our batches and mask them")
    add(
        "--profile",
        action="store_true",
        help="also where each variant's step spends its time, and a trace",
    )
    add_size_options(parser)
    given = parse(parser, argv, PRESETS)
    given.models = tuple(model for model in given.models if model != "none")
    given.peers = tuple(peer for peer in given.peers if peer != "none")
    if missing := set(given.peers) - set(INSTALLED):
        raise UserError(f"--peers {missing.pop()} is not installed: install it, or leave it out")
    if any(given.n_heads % group for group in given.groups):
        raise UserError(f"--groups must be divisors of the {given.n_heads} heads")
    return given
