"""A corpus of local files → a folder of token shards that `TokenShards` streams.

    DIR/train/, DIR/val/   litdata chunks: documents one after the other, each with its end-of-document token
    DIR/tokenizer.json
    DIR/manifest.json      what the shards hold and how they were made

The folder is built beside its final place and renamed at the end: it is there whole or not at all.
The same texts and settings give the same bytes, whatever the machine.
"""

import contextlib
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from litdata import TokensLoader, optimize
from tokenizers import Tokenizer

from anlit.data import corpus as corpora
from anlit.data import tokenizer as bpe
from anlit.data.shards import FORMAT_VERSION, MANIFEST, TOKENIZER, chunks_of, read_manifest
from anlit.errors import UserError

MB = 1 << 20
TASK_BYTES = MB  # text that a worker encodes at once
WORKER_BYTES = 16 * MB  # text for one worker; from the corpus, not the machine, because it shapes the chunks
MOST_WORKERS = 32
CHUNKS_WANTED = 16  # enough to shuffle and to serve a few ranks with a few workers each
TOKENIZER_BYTES = 256 * MB  # text that the BPE is trained on, at most
SKIPPED_LISTED = 1000  # skipped files named in the manifest, for each reason


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the shards hold."""

    corpus: str
    files: list[corpora.SourceFile]
    vocab_size: int = 4096
    val_fraction: float = 0.05
    tokenizer: str | None = None
    end_of_document: str = bpe.END_OF_DOCUMENT
    origin: Mapping[str, Any] | None = None
    """Where the files come from (folder, pattern, interpreter), for the comparison with an older folder."""

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "corpus": self.corpus,
            "val_fraction": self.val_fraction,
            "end_of_document": self.end_of_document,
            **(self.origin or {}),
        }
        if self.tokenizer is None:
            settings["vocab_size"] = self.vocab_size
        else:
            bpe.load_tokenizer(self.tokenizer)
            settings["tokenizer_sha256"] = bpe.file_sha256(self.tokenizer)
        if self.files:
            settings["listing_sha256"] = corpora.listing_sha256(self.files)
        return settings


def prepare(path: str | Path, recipe: Recipe) -> dict[str, Any]:
    """Make `path` the prepared folder of `recipe`, or find that it already is.

    Returns:
        The manifest.

    Raises:
        UserError: the folder holds something else, or the corpus cannot be split.
    """
    target = Path(path)
    if target.exists() and any(target.iterdir()):
        return _reuse(target, recipe)
    building = _building_folder(target)
    try:
        manifest = _build(building, recipe)
        try:
            building.rename(target)
        except OSError:  # another process was quicker; what it made is the same
            return _reuse(target, recipe)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"{target}: {_counts(manifest['train'])} to train on, {_counts(manifest['val'])} held out.")
    return manifest


def _reuse(target: Path, recipe: Recipe) -> dict[str, Any]:
    manifest = read_manifest(str(target))
    then, now = manifest.get("settings", {}), recipe.settings()
    if "listing_sha256" not in now:  # the files are not on this machine: the shards are all there is
        then = {key: value for key, value in then.items() if key != "listing_sha256"}
    differs = [
        f"{key} {then.get(key)} → {now.get(key)}" for key in sorted({*then, *now}) if then.get(key) != now.get(key)
    ]
    if differs:
        raise UserError(
            f"{target} was prepared with other settings or files ({', '.join(differs)}): remove the folder, "
            "choose another with --data.path, or read it as it is with --data TokenShards."
        )
    return manifest


def _building_folder(target: Path) -> Path:
    """A fresh sibling of `target`, named by host and process; siblings of dead processes are removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.preparing-{socket.gethostname()}-"
    for stale in target.parent.glob(f"{prefix}*"):
        pid = stale.name.removeprefix(prefix)
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(stale, ignore_errors=True)
    building = target.parent / f"{prefix}{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    return building


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _build(folder: Path, recipe: Recipe) -> dict[str, Any]:
    settings = recipe.settings()
    say(f"Preparing {recipe.corpus}: reading {len(recipe.files):,} files.")
    documents = corpora.collect(recipe.files, recipe.val_fraction)
    tokenizer = _provide_tokenizer(folder, recipe, documents.train)
    end_id = bpe.end_of_document_id(tokenizer, recipe.end_of_document)
    splits = {}
    for split, part in (("train", documents.train), ("val", documents.val)):
        say(f"Encoding {split}: {len(part):,} documents, {_size(part) / 1e6:.1f} MB.")
        splits[split] = _write_split(folder, split, part, end_id)
        _stamp(folder / split / "index.json", documents.content_sha256())
    manifest = {
        "format_version": FORMAT_VERSION,
        "corpus": recipe.corpus,
        "settings": settings,
        "files": len(recipe.files),
        **{key: sum(part[key] for part in splits.values()) for key in ("documents", "bytes", "tokens")},
        **splits,
        "skipped": {
            reason: {"count": len(labels), "files": labels[:SKIPPED_LISTED]}
            for reason, labels in documents.skipped.items()
        },
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_document": end_id,
        "document_token_at": "end",
        "tokenizer_sha256": bpe.file_sha256(folder / TOKENIZER),
        "content_sha256": documents.content_sha256(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("litdata", "tokenizers")},
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def _provide_tokenizer(folder: Path, recipe: Recipe, train: list[corpora.Document]) -> Tokenizer:
    """Train a BPE on the training part, or copy the one that was given, to `folder`/tokenizer.json."""
    if recipe.tokenizer is not None:
        shutil.copyfile(recipe.tokenizer, folder / TOKENIZER)
    else:
        say(f"Training the tokenizer: {recipe.vocab_size:,} tokens, {min(_size(train), TOKENIZER_BYTES) / 1e6:.1f} MB.")
        bpe.train_bpe(corpora.texts(train, TOKENIZER_BYTES), recipe.vocab_size).save(str(folder / TOKENIZER))
    return bpe.load_tokenizer(folder / TOKENIZER)


def _write_split(folder: Path, split: str, documents: list[corpora.Document], end_id: int) -> dict[str, int]:
    size = _size(documents)
    tasks = _tasks(documents)
    workers = min(MOST_WORKERS, len(tasks), 1 + size // WORKER_BYTES)
    failure = folder / "failure.txt"
    with _single_threaded_tokenizers():
        optimize(
            fn=partial(_encode_task, tasks, str(folder / TOKENIZER), end_id, failure),
            inputs=list(range(len(tasks))),
            output_dir=str(folder / split),
            chunk_bytes=min(64 * MB, max(MB, size // CHUNKS_WANTED)),
            item_loader=TokensLoader(),
            num_workers=workers,
            keep_data_ordered=True,
            reorder_files=False,
            verbose=False,
            # Forked workers start in 0.1 s, spawned ones in 8 s; they touch nothing but numpy and tokenizers.
            start_method="fork" if sys.platform == "linux" else "spawn",
        )
    if failure.exists():
        raise UserError(f"{failure.read_text()} Repeat the preparation while the texts stay as they are.")
    chunks = chunks_of(str(folder), split)
    return {
        "documents": len(documents),
        "bytes": size,
        "tokens": sum(c["dim"] for c in chunks),
        "chunks": len(chunks),
    }


def _stamp(index: Path, content_sha256: str) -> None:
    """Put the content's hash where litdata writes the time: it names local caches of remote shards by it."""
    record = {**json.loads(index.read_text()), "updated_at": content_sha256}
    index.write_text(json.dumps(record, sort_keys=True))


def _encode_task(
    tasks: list[list[corpora.Document]], tokenizer: str, end_id: int, failure: Path, task: int
) -> Iterator[np.ndarray]:
    """Run by litdata's workers: the token arrays of one task's documents.

    An exception would leave processes of litdata waiting for ever, so it goes into the file `failure`.
    """
    try:
        texts = [document.text() for document in tasks[task]]
    except (OSError, ValueError) as error:
        failure.write_text(str(error))
        return
    yield from bpe.encode_documents(bpe.load_tokenizer(tokenizer), texts, end_id)


def _tasks(documents: list[corpora.Document]) -> list[list[corpora.Document]]:
    """Consecutive documents in groups of about `TASK_BYTES`."""
    groups: list[list[corpora.Document]] = [[]]
    size = 0
    for document in documents:
        if size >= TASK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(document)
        size += document.size
    return groups


@contextlib.contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """The workers are the parallelism; threads of the parent's tokenizer do not survive a fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _size(documents: list[corpora.Document]) -> int:
    return sum(document.size for document in documents)


def _counts(split: Mapping[str, int]) -> str:
    return f"{split['tokens']:,} tokens of {split['documents']:,} documents"


def say(text: str) -> None:
    """One line on the terminal's error stream, with the time: preparing can take minutes."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)
