"""What `anlit benchmark data` works on: the texts, the tokenizer and the shards that it generates once."""

import argparse
import json
import os
import shutil
from pathlib import Path

import numpy as np

from anlit.benchmarks.data.texts import read_slimpajama, write_slimpajama
from anlit.benchmarks.options import say
from anlit.data.preparation.catalogue import Options, fineweb_bin
from anlit.data.preparation.formats.bin_tokens import HEADER, HEADER_BYTES, MAGIC, TOKEN, VERSION
from anlit.data.preparation.prepare import prepare
from anlit.data.preparation.recipe import GPT2_END_OF_DOCUMENT, NO_TOKENIZER
from anlit.data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_bpe

VOCAB_SIZE = 32_000
FILES = 64
"""About so many, so that no worker is idle at the end, as with the 59,166 of the hub."""
TOKENIZER_DOCUMENTS = 2_000
"""That the BPE is trained on."""
DOCUMENT_TOKENS = 1000
"""On average, of random tokens."""
FILE_TOKENS, VAL_TOKENS = 100_000_000, 1 << 20


def text(given: argparse.Namespace) -> Path:
    """Python sources in SlimPajama's layout; written once for each size."""
    folder = given.folder / f"text-{given.megabytes:g}"
    done = folder / "written.json"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        say(f"writing {given.megabytes:g} MB of Python sources in SlimPajama's layout")
        written = write_slimpajama(folder, given.megabytes, given.megabytes / FILES)
        done.write_text(json.dumps(written))
    return folder


def tokenizer_folder(given: argparse.Namespace, text: Path) -> Path:
    """Folder with the tokenizer.json, and beside it what litgpt wants to know of it.

    Raises:
        UserError: The tokenizer that was given cannot be read.
    """
    folder = given.folder / ("tokenizer" if given.tokenizer is None else "tokenizer-given")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    if given.tokenizer is not None:
        load_tokenizer(given.tokenizer)
        shutil.copyfile(given.tokenizer, file)
    elif not file.is_file():
        say(f"training a BPE with {VOCAB_SIZE:,} tokens")
        some = (document for _, document in zip(range(TOKENIZER_DOCUMENTS), read_slimpajama(text), strict=False))
        train_bpe(some, VOCAB_SIZE).save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def shards(given: argparse.Namespace) -> Path:
    """Random tokens as `anlit prepare FineWebBin` makes shards of them; made once for each number of tokens."""
    folder = given.folder / f"tokens-{given.tokens}"
    source = given.folder / f"tokens-{given.tokens}-source"
    if not (folder / "manifest.json").is_file():
        say(f"writing {given.tokens:,} random tokens")
        rng = np.random.default_rng(0)
        source.mkdir(parents=True, exist_ok=True)
        _write_tokens(source / "fineweb_val_000000.bin", VAL_TOKENS, rng)
        for number, start in enumerate(range(0, given.tokens, FILE_TOKENS), start=1):
            size = min(FILE_TOKENS, given.tokens - start)
            _write_tokens(source / f"fineweb_train_{number:06d}.bin", size, rng)
        prepare(folder, fineweb_bin(Options(source=str(source), tokenizer=NO_TOKENIZER)))
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


def read_all(folder: Path) -> None:
    """Bring the files into the system's cache."""
    for path in folder.rglob("*.bin"):
        path.read_bytes()


def forget_all(folder: Path) -> None:
    """Take the files out of the system's cache, where the system allows it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
