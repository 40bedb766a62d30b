"""`anlit benchmark step`: training steps of our models, and of what one would take instead, beside each other.

Each variant is built, checked (finite losses, the same eager and compiled; a peer has as many parameters and FLOPs) and
warmed up; then all take turns in this one run, and what is compared is paired inside a round. Our step is Lightning's,
with optimizer, clipping and the norms' restoration; loader, callbacks and logging are left out. A peer's is the plain
loop: autocast, cross-entropy, clipping to 1.0, fused AdamW. Each row is one document, as the peers have it, unless
--documents is given.
"""

import argparse
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from anlit.attention.backends import BACKENDS
from anlit.benchmarks.attention.cases import MECHANISMS
from anlit.benchmarks.options import (
    MINUTES,
    add_device_options,
    check_names,
    device_of,
    names,
    parser_of,
    preset_of,
    say,
)
from anlit.benchmarks.peers.training_step import COMPILED, PEERS
from anlit.benchmarks.process import is_installed, python_of_peer
from anlit.benchmarks.record import Record
from anlit.benchmarks.step.measure import measure
from anlit.benchmarks.step.ours import MODELS
from anlit.benchmarks.step.plan import OURS_COMPILED, PRESETS, Plan, add_size_options, changed_size
from anlit.benchmarks.step.report import finish, notes, table
from anlit.errors import UserError


def main(argv: list[str]) -> int:
    """`anlit benchmark step`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    name = preset_of(given)
    plan = changed_plan(PRESETS[name], given)
    for peer in plan.peers:
        python_of_peer(peer, given.peer_python)
    device = device_of(given)
    settings = {**vars(plan), "size": plan.size.as_json(), "documents": given.documents}
    record = Record("step", argv, given.output, device, f"step-{name}", settings=settings)
    measure(plan, device, given.minutes, given.documents, given.peer_python, record)
    rows = record.values["rows"]
    finish(rows, plan.size.tokens, record.values["peak_flops_per_second"])
    record.finish([table(record, plan.size.title)], notes(rows))
    return 0


def changed_plan(plan: Plan, given: argparse.Namespace) -> Plan:
    """The preset with what was given in its place.

    Raises:
        UserError: A name is not known.
    """
    allowed: dict[str, Collection[str]] = {
        "models": MODELS, "compiled": OURS_COMPILED, "peers_compiled": COMPILED, "mechanisms": MECHANISMS,
        "backends": ("auto", *BACKENDS), "kinds": ("train", "infer"), "peers": ("none", *PEERS),
    }  # fmt: skip
    changes: dict[str, Any] = {}
    for key, known in allowed.items():
        values = getattr(given, key)
        check_names("peer" if key == "peers" else key, values, known)
        if values:
            changes[key] = values
    if given.peers is None:
        changes["peers"] = tuple(peer for peer in plan.peers if is_installed(peer) or given.peer_python)
        for peer in set(plan.peers) - set(changes["peers"]):
            say(f"{peer} is left out: install it, or give --peer_python, the Python of an environment that has it")
    elif given.peers == ("none",):
        changes["peers"] = ()
    if "train" not in changes.get("kinds", ("train",)):
        raise UserError(f"--kinds {','.join(given.kinds)} lacks train, which everything is put beside: add it")
    changes["size"] = changed_size(plan.size, given)
    if given.rounds:
        changes["rounds"] = given.rounds
    return replace(plan, **changes)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("step", __doc__, "--preset cpu --peer_python ~/litgpt/bin/python")
    add_device_options(parser, PRESETS)
    add = parser.add_argument
    add("--models", type=names, metavar="A,…", help=f"of {', '.join(MODELS)}")
    add("--mechanisms", type=names, metavar="A,…", help=f"of {', '.join(MECHANISMS)}")
    add("--backends", type=names, metavar="A,…", help=f"of auto, {', '.join(BACKENDS)}")
    add("--compiled", type=names, metavar="A,…", help="of no, blocks, float8: how ours are run")
    add("--peer", dest="peers", type=names, metavar="A,…", help=f"of {', '.join(PEERS)}, or none (all that are there)")
    add("--peers_compiled", type=names, metavar="A,…", help="of no, blocks, whole: how the peers are run")
    add("--peer_python", metavar="PATH", help="Python of an environment with the peers that this one lacks")
    add("--kinds", type=names, metavar="A,…", help="of train, infer")
    add("--documents", action="store_true", help="pack documents into ours and mask them")
    add_size_options(parser)
    add("--rounds", type=int, help="how often the variants take turns")
    add("--minutes", type=float, default=MINUTES, help="begin no round after so long (%(default)s)")
    return parser
