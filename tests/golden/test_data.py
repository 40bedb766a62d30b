"""Prepared folders, orders of draws and batches, against stored hashes.

All folders here are made by a single process. If an issue says that hashes change, write them anew:

    python -m tests.golden.test_data
"""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit import TokenShards
from anlit.cli import main
from anlit.data.order import training_order
from tests.data import layouts
from tests.data.layouts import documents
from tests.data.prepared import random_tokens, write_prepared
from tests.data.preparing import train_tokenizer
from tests.data.reader import read_stream

RECORD = Path(__file__).with_name("data.json")
TEXTS = list(documents(60, seed=21))


def write_texts(folder: Path) -> None:
    """A file for each text, a copy, an empty file, and a file that is not UTF-8."""
    folder.mkdir()
    for number, text in enumerate([*TEXTS[:40], TEXTS[0], ""]):
        (folder / f"{number:02}.txt").write_bytes(text.encode())
    (folder / "latin1.txt").write_bytes("größe".encode("latin-1"))


def write_slimpajama(folder: Path) -> None:
    texts_by_split = {"train": TEXTS[:40], "validation": TEXTS[40:50], "test": TEXTS[50:]}
    layouts.slimpajama(folder, texts_by_split, n_files=3)


BPE = ["--tokenizer", "bpe", "--vocab_size", "400"]
CORPORA: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "zstd": (write_slimpajama, ["SlimPajama"]),
    "trained": (write_texts, ["TextFiles", "--val_fraction", "0.2", "--on_bad", "skip", *BPE]),
}
"""A corpus with subsets, and a corpus with a trained tokenizer. tests/data has all formats."""

WEIGHTS = {"web": 0.5, "code": 0.3, "books": 0.2}
CHUNK_TOKENS = {
    "web": [[7000] * 40, [300, 5000]],
    "code": [[2500] * 31 + [17]],
    "books": [[64], [9000, 100, 12_345]],
}
ORDERS: dict[str, tuple[dict[str, float] | None, bool]] = {
    "pooled": (None, True),
    "weighted": (WEIGHTS, True),
    "unshuffled": (None, False),
    "weighted, unshuffled": (WEIGHTS, False),
}
"""Weights of the subsets, and whether blocks are shuffled."""

BATCHES: dict[str, dict[str, Any]] = {
    "pooled": {},
    "weighted": {"weights": WEIGHTS, "score_first_token": False},
    "unshuffled": {"shuffle": False},
}
"""Settings of `TokenShards`."""

RESUMED_AT = 17
"""The number of the first batch after a resume."""

RECORDED_KEYS = (
    "documents",
    "bytes",
    "tokens",
    "skipped",
    "vocab_size",
    "tokenizer_sha256",
    "content_sha256",
)
"""The entries of a manifest that are recorded."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def prepared(corpus: str, folder: Path) -> dict[str, Any]:
    """The manifest and the hashes of the streams that `anlit prepare` makes of a corpus."""
    write_corpus, arguments = CORPORA[corpus]
    source = folder / "hub"
    out = folder / "out"
    write_corpus(source)
    command = ["prepare", *arguments, "--source", str(source), "--output", str(out)]
    if "--tokenizer" not in arguments:
        tokenizer = train_tokenizer(folder / "tokenizer.json")
        command += ["--tokenizer", str(tokenizer)]

    assert main(command) == 0

    manifest = json.loads((out / "manifest.json").read_bytes())
    record: dict[str, Any] = {key: manifest[key] for key in RECORDED_KEYS}
    record["streams"] = {}
    for path in sorted(out.rglob("index.json")):
        stream = path.parent.relative_to(out).as_posix()
        tokens = read_stream(out, stream)
        record["streams"][stream] = sha256(tokens.tobytes())
    return record


def hash_of_draws(order: str) -> str:
    """Hash of 60,000 draws from three positions. The last is in a later pass and period."""
    weights, shuffle = ORDERS[order]
    training = training_order(CHUNK_TOKENS, 16, weights, shuffle, seed=5)
    arrays: list[np.ndarray] = []
    for first in (0, 12_345, 1_000_003):
        arrays += training.draw(first, 20_000)
    draws = np.concatenate(arrays).astype("<i8")
    return sha256(draws.tobytes())


STREAM_TOKENS = {
    "train/web": 20_000,
    "train/code": 9_000,
    "train/books": 3_000,
    "val/web": 1_500,
    "val/books": 700,
}


def write_shards(folder: Path) -> str:
    """A folder with three subsets, by the tests' writer."""
    tokens = {}
    for stream, size in STREAM_TOKENS.items():
        tokens[stream] = random_tokens(size, seed=size)
    write_prepared(folder, tokens, chunk_tokens=2500)
    return str(folder)


def batch_bytes(batch: Any) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in batch[:5])


def hashes_of_batches(
    folder: str, case: str, num_workers: int, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Hash of training batches 17 to 39, the state before them, hash of all validation batches."""
    settings = BATCHES[case]
    data = TokenShards(folder, batch_size=4, context_length=64, num_workers=num_workers, **settings)
    data.setup()
    data.load_state_dict(state or {})
    first = RESUMED_AT if state else 0
    digest = hashlib.sha256()
    state_before = None
    for number, batch in zip(range(first, 40), data.train_dataloader(), strict=False):
        if number >= RESUMED_AT:
            digest.update(batch_bytes(batch))
        if number == RESUMED_AT - 1:
            state_before = data.state_dict()
    data.teardown("fit")
    validation = b"".join(batch_bytes(batch) for batch in data.val_dataloader())
    return {"train": digest.hexdigest(), "state": state_before, "val": sha256(validation)}


STORED = json.loads(RECORD.read_text()) if RECORD.is_file() else {}


@pytest.mark.parametrize("corpus", list(CORPORA))
def test_a_corpus_is_prepared_as_it_was(corpus: str, tmp_path: Path) -> None:
    assert prepared(corpus, tmp_path) == STORED["prepared"][corpus]


@pytest.mark.parametrize("order", list(ORDERS))
def test_the_draws_are_as_they_were(order: str) -> None:
    assert hash_of_draws(order) == STORED["draws"][order]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", list(BATCHES))
def test_the_batches_are_as_they_were_also_after_a_resume(
    case: str, num_workers: int, tmp_path: Path
) -> None:
    stored = STORED["batches"][case]
    folder = write_shards(tmp_path / "shards")

    uninterrupted = hashes_of_batches(folder, case, num_workers)
    resumed = hashes_of_batches(folder, case, num_workers, stored["state"])

    uninterrupted["state"]["split"]["num_workers"] = 0
    assert uninterrupted == stored
    assert resumed["train"] == stored["train"]


def write() -> None:
    """Store this machine's hashes."""
    record: dict[str, Any] = {"prepared": {}, "draws": {}, "batches": {}}
    for corpus in CORPORA:
        with tempfile.TemporaryDirectory() as folder:
            record["prepared"][corpus] = prepared(corpus, Path(folder))
    for order in ORDERS:
        record["draws"][order] = hash_of_draws(order)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder) / "shards")
        for case in BATCHES:
            record["batches"][case] = hashes_of_batches(shards, case, num_workers=0)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    write()
