"""`anlit benchmark data`: from text to batches, measured beside the bare tokenizers library, a mapped file and litgpt.

prepare      text → tokens: ours and litgpt's preparation of the same SlimPajama files, and encode_batch alone
stream       shards → batches of 8 × 2048 tokens: ours, a mapped file, litgpt's data module
memory       what each loader process holds while it streams
wait         what share of its time a device would wait for batches, if it asked for so many tokens a second
first-batch  from a fresh process to a batch, at the start and at 90 % of an epoch

The programs take turns, each trial in a fresh process. About an hour with the defaults and litgpt on two cores; leave
the machine alone meanwhile.
"""

import argparse
from pathlib import Path

import torch

from anlit.benchmarks.data.parts import PARTS
from anlit.benchmarks.data.report import table
from anlit.benchmarks.options import check_names, names, parser_of, say
from anlit.benchmarks.process import python_of_peer
from anlit.benchmarks.record import Record
from anlit.errors import UserError


def main(argv: list[str]) -> int:
    """`anlit benchmark data`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("parts", given.parts, PARTS)
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {given.folder} cannot be made ({error.strerror}): give a writable folder") from error
    if given.peer_python is None:
        say("litgpt is left out: give --peer_python, the Python of an environment with litgpt, to have it beside ours")
    else:
        python_of_peer("litgpt", given.peer_python)
    settings = {**vars(given), "folder": str(given.folder)}
    record = Record("data", argv, given.output, torch.device("cpu"), settings=settings, measurements=[])
    for part in given.parts:
        PARTS[part](given, record)
        record.keep()
    record.finish([table(record.values["measurements"])])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data", __doc__, "--peer_python ~/litgpt/bin/python")
    add = parser.add_argument
    add("--folder", type=Path, default=Path("data/benchmark"), help="generated texts and shards, kept (%(default)s)")
    add("--parts", type=names, default=tuple(PARTS), metavar="A,…", help=f"of {', '.join(PARTS)} (all)")
    add("--peer_python", metavar="PATH", help="Python of an environment with litgpt; without it litgpt is left out")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, such as GPT-2's (a BPE trained on the text)")
    add("--megabytes", type=float, default=200, help="text to prepare, 10⁶ bytes (%(default)s)")
    add("--tokens", type=int, default=1_000_000_000, help="random tokens to stream, two bytes each (%(default)s)")
    add("--rounds", type=int, default=5, help="repetitions (%(default)s)")
    add("--seconds", type=float, default=5, help="of streaming in each trial (%(default)s)")
    add("--memory_seconds", type=float, default=90, help="of streaming while memory is watched (%(default)s)")
    return parser
