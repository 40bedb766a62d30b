"""`anlit benchmark step`: training steps of our models, and of what one would take instead, beside each other.

Each variant is built, checked (finite losses, the same eager and compiled; a peer has as many parameters and FLOPs) and
warmed up; then all take turns in this one run, and what is compared is paired inside a round. Our step is Lightning's,
with optimizer, clipping and the norms' restoration; loader, callbacks and logging are left out. A peer's is the plain
loop: autocast, cross-entropy, clipping to 1.0, fused AdamW. Each row is one document, as the peers have it, unless
--documents is given.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from anlit.attention.backends import BACKENDS
from anlit.benchmarks.attention_cases import MECHANISMS
from anlit.benchmarks.step_entrants import can_have, check_peers
from anlit.benchmarks.step_options import (
    add_size_options,
    changed_size,
    check_names,
    default_preset,
    device_of,
    names,
    say,
)
from anlit.benchmarks.step_ours import MODELS
from anlit.benchmarks.step_report import finish, targets
from anlit.benchmarks.step_size import OURS_COMPILED, PRESETS, Plan
from anlit.benchmarks.step_table import markdown, plot, show
from anlit.benchmarks.step_trials import measure
from anlit.benchmarks.step_worker import COMPILED, PEERS
from anlit.errors import UserError
from anlit.evaluation.report import device_name
from anlit.reporting.files import output_folder, write_json
from anlit.reporting.provenance import environment


def benchmark(plan: Plan, name: str, given: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure, print the table and write step-NAME.json, .md and .png into `given.output`.

    Returns:
        The record: environment, settings, `rows`, `targets`.

    Raises:
        UserError: The folder cannot be written, or a peer is nowhere installed.
    """
    folder = output_folder(given.output)
    check_peers(plan.peers, given.peer_python)
    device = device_of(given, name)
    record: dict[str, Any] = {"benchmark": "step", "command": command, "environment": environment()}
    record["environment"]["hardware"]["device"] = device_name(device)
    record |= {"threads": torch.get_num_threads(), "settings": {**vars(plan), "size": plan.size.as_json()}}
    record["settings"]["documents"] = given.documents
    record |= measure(plan, device, given.minutes, given.documents, given.peer_python, say)
    finish(record["rows"], plan.size.tokens, record["peak_flops_per_second"])
    record["targets"] = targets(record["rows"], "" if given.documents else plan.aims, plan.size.label)
    record["environment"]["load_after"] = os.getloadavg()[0]
    write_json(folder / f"step-{name}.json", record)
    (folder / f"step-{name}.md").write_text(markdown(record))
    plot(record, folder / f"step-{name}.png")
    show(record)
    print(f"Written to {folder / f'step-{name}'}.json, .md and .png.")
    return record


def main(argv: list[str]) -> int:
    """`anlit benchmark step`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    name = given.preset or default_preset()
    plan = _changed(PRESETS[name], given)
    benchmark(plan, name, given, shlex.join(["anlit", "benchmark", "step", *argv]))
    return 0


def _changed(plan: Plan, given: argparse.Namespace) -> Plan:
    """The preset with what was given in its place."""
    allowed: dict[str, Sequence[str]] = {
        "models": list(MODELS), "compiled": OURS_COMPILED, "peers_compiled": COMPILED, "mechanisms": list(MECHANISMS),
        "backends": ["auto", *BACKENDS], "kinds": ("train", "forward", "infer"), "peers": ["none", *PEERS],
    }  # fmt: skip
    changes: dict[str, Any] = {}
    for key, known in allowed.items():
        values = getattr(given, key)
        check_names("peer" if key == "peers" else key.replace("_", "-"), values, known)
        if values:
            changes[key] = values
    if given.peers is None:
        changes["peers"] = tuple(peer for peer in plan.peers if can_have(peer, given.peer_python))
        for peer in set(plan.peers) - set(changes["peers"]):
            say(f"{peer} is left out: install it, or give --peer-python, the Python of an environment that has it")
    elif given.peers == ("none",):
        changes["peers"] = ()
    if "train" not in changes.get("kinds", ("train",)):
        raise UserError(f"--kinds {','.join(given.kinds)} lacks train, which everything is put beside: add it")
    size = changed_size(plan.size, given)
    if size != plan.size:
        changes |= {"size": size, "aims": ""}
    for field in ("rounds", "repeats"):
        if getattr(given, field):
            changes[field] = getattr(given, field)
    return replace(plan, **changes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anlit benchmark step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: anlit benchmark step --preset cpu --peer-python ~/litgpt/bin/python",
    )
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), help="what to measure (h200 where there is a GPU, else cpu)")
    add("--models", type=names, metavar="A,…", help=f"of {', '.join(MODELS)}")
    add("--mechanisms", type=names, metavar="A,…", help=f"of {', '.join(MECHANISMS)}")
    add("--backends", type=names, metavar="A,…", help=f"of auto, {', '.join(BACKENDS)}")
    add("--compiled", type=names, metavar="A,…", help="of no, blocks, float8: how ours are run")
    add("--peer", dest="peers", type=names, metavar="A,…", help=f"of {', '.join(PEERS)}, or none (all that are there)")
    add("--peers-compiled", type=names, metavar="A,…", help="of no, blocks, whole: how the peers are run")
    add("--peer-python", metavar="PATH", help="Python of an environment with the peers that this one lacks")
    add("--kinds", type=names, metavar="A,…", help="of train, forward, infer")
    add("--documents", action="store_true", help="pack documents into ours and mask them; no targets then")
    add_size_options(parser)
    add("--rounds", type=int, help="how often the variants take turns")
    add("--repeats", type=int, help="steps in a turn")
    add("--minutes", type=float, default=7.5, help="begin no round after so long (%(default)s)")
    add("--output", default="runs/benchmark", help="folder for step-PRESET.json, .md, .png (%(default)s)")
    return parser
