"""`anlit benchmark data`: from text to batches, measured beside the bare tokenizers library, a mapped file and litgpt.

prepare      text → tokens: ours and litgpt's preparation of the same SlimPajama files, and encode_batch alone
stream       shards → batches of 8 × 2048 tokens: ours, a mapped file, litgpt's data module
memory       what each loader process holds while it streams
wait         what share of its time a device would wait for batches, if it asked for so many tokens a second
first-batch  from a fresh process to a batch, at the start and at 90 % of an epoch
"""

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anlit.benchmarks.data_material import Settings
from anlit.benchmarks.data_rounds import PARTS, check_peer
from anlit.benchmarks.data_table import show, targets
from anlit.errors import UserError
from anlit.reporting.provenance import environment

RESULT = "data.json"


def benchmark(settings: Settings, parts: list[str], output: Path, command: str) -> dict[str, Any]:
    """Run the parts, print the table and write `output`/data.json.

    Returns:
        What was written: the environment, the settings, one entry for each row of the table, the targets.

    Raises:
        UserError: a program failed, the peer cannot be used, or a folder cannot be written.
    """
    for folder in (settings.folder, output):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}): give a writable folder.") from error
    if settings.peer_python is None:
        _say("litgpt is left out: give --peer-python, the Python of an environment with litgpt, to have it beside ours")
    else:
        check_peer(settings.peer_python)
    record: dict[str, Any] = {"benchmark": "data", "command": command, "environment": environment()}
    record["settings"] = {**asdict(settings), "folder": str(settings.folder), "parts": parts}
    measurements = [measurement for part in parts for measurement in PARTS[part](settings, _say)]
    record["peer"] = next((m["rounds"][0]["versions"] for m in measurements if m["program"] == "litgpt"), None)
    record["environment"]["load_after"] = os.getloadavg()[0]
    record |= {"measurements": measurements, "targets": targets(measurements)}
    (output / RESULT).write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    print(f"Written to {output / RESULT}.")
    return record


def main(argv: list[str]) -> int:
    """`anlit benchmark data`; returns the exit status and raises UserError for the user's mistakes."""
    arguments = _parser().parse_args(argv)
    unknown = [part for part in arguments.parts.split(",") if part not in PARTS]
    if unknown:
        raise UserError(f"--parts {','.join(unknown)} is not known: choose from {','.join(PARTS)}.")
    settings = Settings(
        folder=arguments.folder,
        megabytes=arguments.megabytes,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        stream_seconds=arguments.seconds,
        memory_seconds=arguments.memory_seconds,
        peer_python=arguments.peer_python,
        tokenizer=arguments.tokenizer,
    )
    benchmark(settings, arguments.parts.split(","), arguments.output, shlex.join(["anlit", "benchmark", "data", *argv]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="anlit benchmark data",
        description="Measures preparing text and streaming batches. The programs take turns, each trial in a fresh "
        "process; the table has medians over the rounds.",
        epilog="About an hour with the defaults and litgpt on two cores. Leave the machine alone meanwhile. Example: "
        "anlit benchmark data --peer-python ~/litgpt/bin/python",
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path("data/benchmark"), help="generated texts and shards, kept (%(default)s)")
    add("--output", type=Path, default=Path("runs/benchmark"), help=f"folder for {RESULT} (%(default)s)")
    add("--parts", default=",".join(PARTS), help="what to measure (%(default)s)")
    add("--peer-python", metavar="PATH", help="Python of an environment with litgpt; without it litgpt is left out")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, such as GPT-2's (a BPE trained on the text)")
    add("--megabytes", type=float, default=200, help="text to prepare, 10⁶ bytes (%(default)s)")
    add("--tokens", type=int, default=1_000_000_000, help="random tokens to stream, two bytes each (%(default)s)")
    add("--rounds", type=int, default=5, help="repetitions (%(default)s)")
    add("--seconds", type=float, default=5, help="of streaming in each trial (%(default)s)")
    add("--memory-seconds", type=float, default=90, help="of streaming while memory is watched (%(default)s)")
    return parser


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
