"""`anlit benchmark data`: from text to batches.

prepare      text → tokens: our preparation of the interpreter's sources, compared with the bare tokenizers library
stream       shards → batches of 8 × 2048 tokens: our loader, compared with litdata's on the same shards

The programs take turns, each trial in a new process. The data are generated once, in OUTPUT/data. Do not use the
machine for other work meanwhile.
"""

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anlit.benchmarks.cases import Case, Group, Ready, Row, beside, measure, notes, tables
from anlit.benchmarks.data.trials import texts
from anlit.benchmarks.options import add_loop_options, check_names, names, parser_of, say
from anlit.benchmarks.process import measure_once
from anlit.benchmarks.record import Record
from anlit.data.preparation.catalogue import Options, fineweb_bin
from anlit.data.preparation.formats.bin_tokens import HEADER, HEADER_BYTES, MAGIC, TOKEN, VERSION
from anlit.data.preparation.prepare import prepare as prepare_folder
from anlit.data.preparation.recipe import GPT2_END_OF_DOCUMENT, NO_TOKENIZER
from anlit.data.tokenizer import load_tokenizer, train_bpe
from anlit.reporting.files import output_folder
from anlit.reporting.provenance import cores

TRIALS = "anlit.benchmarks.data.trials"
SHAPE = {"batch_size": 8, "length": 2048}
STREAMING_WORKERS = (0, 1, 2)
VOCAB_SIZE = 32_000
TOKENIZER_DOCUMENTS = 2_000
"""Documents that the BPE is trained on."""
DOCUMENT_TOKENS = 1000
"""Mean length of a document of random tokens."""
FILE_TOKENS, VAL_TOKENS = 100_000_000, 1 << 20


def _case(
    label: str, trial: str, before: Callable[[], None] = lambda: None, base: str | None = None, **arguments: Any
) -> Case:
    """A trial in a separate process; `before` is not measured."""

    def turn() -> dict[str, float]:
        before()
        found: dict[str, float] = measure_once(TRIALS, trial, **arguments)
        return found

    def build(rows: list[Row]) -> Ready:
        return Ready(turn)

    return Case(label, build, base=base)


def prepare(given: argparse.Namespace) -> Group:
    """Text to tokens: the tokenizers library alone, and our preparation with one worker and with one per core."""
    tokenizer, output = str(tokenizer_file(given)), given.folder / "prepared"
    clear = partial(shutil.rmtree, output, ignore_errors=True)
    ours = [
        _case(f"anlit, workers: {workers}", "prepare", clear, output=str(output), tokenizer=tokenizer, workers=workers)
        for workers in sorted({1, cores()})
    ]
    return Group("prepare", [_case("encode_batch alone", "bare", tokenizer=tokenizer), *ours])


def stream(given: argparse.Namespace) -> Group:
    """Shards to batches: litdata's loader, which returns raw blocks, and ours."""
    path = shards(given)
    for file in path.rglob("*.bin"):
        file.read_bytes()  # into the system's cache
    arguments = {**SHAPE, "path": str(path), "seconds": given.seconds}
    programs = (("litdata, raw blocks", "litdata"), ("anlit", "stream"))
    return Group("stream", [
        _case(f"{name}, workers: {workers}", trial, base=f"{programs[0][0]}, workers: {workers}", **arguments,
              workers=workers)
        for workers in STREAMING_WORKERS
        for name, trial in programs
    ])  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], Group]] = {"prepare": prepare, "stream": stream}


def tokenizer_file(given: argparse.Namespace) -> Path:
    """The given tokenizer.json, or a BPE that is trained once.

    Raises:
        UserError: The tokenizer that was given cannot be read.
    """
    if given.tokenizer is not None:
        load_tokenizer(given.tokenizer)
        return Path(given.tokenizer)
    file: Path = given.folder / "tokenizer.json"
    if not file.is_file():
        say(f"training a BPE with {VOCAB_SIZE:,} tokens")
        train_bpe(islice(texts(), TOKENIZER_DOCUMENTS), VOCAB_SIZE).save(str(file))
    return file


def shards(given: argparse.Namespace) -> Path:
    """A prepared folder of random tokens, by `anlit prepare FineWebBin`; made once for each number of tokens."""
    folder: Path = given.folder / f"tokens-{given.tokens}"
    source = given.folder / f"tokens-{given.tokens}-source"
    if not (folder / "manifest.json").is_file():
        say(f"writing {given.tokens:,} random tokens")
        rng = np.random.default_rng(0)
        source.mkdir(parents=True, exist_ok=True)
        _write_tokens(source / "fineweb_val_000000.bin", VAL_TOKENS, rng)
        for number, start in enumerate(range(0, given.tokens, FILE_TOKENS), start=1):
            size = min(FILE_TOKENS, given.tokens - start)
            _write_tokens(source / f"fineweb_train_{number:06d}.bin", size, rng)
        prepare_folder(folder, fineweb_bin(Options(source=str(source), tokenizer=NO_TOKENIZER)))
        shutil.rmtree(source)
    return folder


def _write_tokens(path: Path, size: int, rng: np.random.Generator) -> None:
    tokens = rng.integers(0, GPT2_END_OF_DOCUMENT, size, dtype=TOKEN)
    tokens[rng.integers(0, size, size // DOCUMENT_TOKENS)] = GPT2_END_OF_DOCUMENT
    tokens[0] = GPT2_END_OF_DOCUMENT
    header = np.zeros(HEADER_BYTES // HEADER.itemsize, HEADER)
    header[:3] = MAGIC, VERSION, size
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.data)


def main(argv: list[str]) -> int:
    """`anlit benchmark data`; returns the exit status and raises UserError for the user's mistakes."""
    given = _parser().parse_args(argv)
    check_names("parts", given.parts, PARTS)
    record = Record("data", argv, given.output, torch.device("cpu"), settings=dict(vars(given)))
    given.folder = output_folder(given.output) / "data"
    given.folder.mkdir(exist_ok=True)
    measure((PARTS[part](given) for part in given.parts), record, given.rounds, given.minutes)
    columns = {
        "M tokens/s": lambda row: f"{1e-6 / row['seconds']['token']['median']:,.2f}",
        "quartiles": lambda row: " – ".join(f"{1e-6 / one:,.2f}" for one in row["seconds"]["token"]["quartiles"][::-1]),
        "time ÷ other's (95 %)": beside("token"),
        "processor time ÷ other's": beside("processor"),
    }
    record.finish(tables(record, columns), notes(record))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data", __doc__, "--tokens 100000000 --rounds 3")
    add = parser.add_argument
    add("--parts", type=names, default=tuple(PARTS), metavar="A,…", help=f"of {', '.join(PARTS)} (all)")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, such as GPT-2's (a BPE trained on the text)")
    add("--tokens", type=int, default=1_000_000_000, help="random tokens to stream, two bytes each (%(default)s)")
    add("--seconds", type=float, default=5, help="of streaming in each trial (%(default)s)")
    add_loop_options(parser, 5, minutes=60)
    return parser
