"""What `anlit benchmark data` works on: its settings, and the texts, tokenizer and shards it generates once."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anlit.benchmarks.random_shards import random_shards
from anlit.benchmarks.texts import SET_NAMES, python_sources_as_slimpajama, slimpajama_texts
from anlit.data.tokenizer import END_OF_DOCUMENT, load_tokenizer, train_bpe

VOCAB_SIZE = 32_000
FILES = 64  # about; enough that no worker is idle at the end, as with the 59,166 of the hub
TOKENIZER_DOCUMENTS = 2_000  # that the BPE is trained on
# litgpt leaves this subset out when it prepares SlimPajama: all programs shall prepare the same text.
LEFT_OUT_BY_LITGPT = "RedPajamaGithub"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What the user may choose."""

    folder: Path
    """For generated texts and shards."""
    megabytes: float
    tokens: int
    rounds: int
    stream_seconds: float
    memory_seconds: float
    peer_python: str | None
    tokenizer: str | None
    """A tokenizer.json; by default a BPE is trained on the text."""


def text(settings: Settings, say: Say) -> Path:
    """Python sources in SlimPajama's layout; written once for each size."""
    folder = settings.folder / f"text-{settings.megabytes:g}"
    done = folder / "written.json"
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        say(f"writing {settings.megabytes:g} MB of Python sources in SlimPajama's layout")
        names = [name for name in SET_NAMES if name != LEFT_OUT_BY_LITGPT]
        counts = python_sources_as_slimpajama(folder, settings.megabytes, names, settings.megabytes / FILES)
        done.write_text(json.dumps(counts))
    return folder


def tokenizer_folder(settings: Settings, text: Path, say: Say) -> Path:
    """Folder with the tokenizer.json, and beside it what litgpt wants to know of it.

    Raises:
        UserError: the tokenizer that was given cannot be read.
    """
    folder = settings.folder / ("tokenizer" if settings.tokenizer is None else "tokenizer-given")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "tokenizer.json"
    if settings.tokenizer is not None:
        load_tokenizer(settings.tokenizer)
        shutil.copyfile(settings.tokenizer, file)
    elif not file.is_file():
        say(f"training a BPE with {VOCAB_SIZE:,} tokens")
        some = (document for _, document in zip(range(TOKENIZER_DOCUMENTS), slimpajama_texts(text), strict=False))
        train_bpe(some, VOCAB_SIZE).save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def shards(settings: Settings, say: Say) -> Path:
    folder = settings.folder / f"tokens-{settings.tokens}"
    if not folder.is_dir():
        say(f"writing {settings.tokens:,} random tokens")
    random_shards(folder, settings.tokens)
    return folder


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
