"""Prepared folders, orders of draws and batches, against hashes stored before the data's code was rewritten.

Every folder here is made by one task. Where an issue says that they change:

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
    """A file for each text, a copy, an empty one and one that is not UTF-8."""
    folder.mkdir()
    for number, text in enumerate([*TEXTS[:40], TEXTS[0], ""]):
        (folder / f"{number:02}.txt").write_bytes(text.encode())
    (folder / "latin1.txt").write_bytes("größe".encode("latin-1"))


def write_slimpajama(folder: Path) -> None:
    layouts.slimpajama(
        folder, {"train": TEXTS[:40], "validation": TEXTS[40:50], "test": TEXTS[50:]}, n_files=3
    )


BPE = ["--tokenizer", "bpe", "--vocab_size", "400"]
CORPORA: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "zstd": (write_slimpajama, ["SlimPajama"]),
    "trained": (write_texts, ["TextFiles", "--val_fraction", "0.2", "--on_bad", "skip", *BPE]),
}
"""With subsets, and with a tokenizer that is trained; every format is read against its texts in tests/data."""
WEIGHTS = {"web": 0.5, "code": 0.3, "books": 0.2}
CHUNK_TOKENS = {
    "web": [[7000] * 40, [300, 5000]],
    "code": [[2500] * 31 + [17]],
    "books": [[64], [9000, 100, 12_345]],
}
ORDERS: dict[str, tuple[dict[str, float] | None, bool]] = {
    "pooled": (None, True), "weighted": (WEIGHTS, True), "unshuffled": (None, False),
    "weighted, unshuffled": (WEIGHTS, False),
}  # fmt: skip
BATCHES: dict[str, dict[str, Any]] = {
    "pooled": {}, "weighted": {"weights": WEIGHTS, "score_first_token": False}, "unshuffled": {"shuffle": False},
}  # fmt: skip
RESUMED_AT = 17


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def prepared(corpus: str, folder: Path) -> dict[str, Any]:
    """What `anlit prepare` makes of a corpus."""
    write, arguments = CORPORA[corpus]
    write(folder / "hub")
    if "--tokenizer" not in arguments:
        arguments = [*arguments, "--tokenizer", str(train_tokenizer(folder / "tokenizer.json"))]
    out = folder / "out"
    assert main(["prepare", *arguments, "--source", str(folder / "hub"), "--output", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_bytes())
    streams = sorted(path.parent.relative_to(out).as_posix() for path in out.rglob("index.json"))
    kept = (
        "documents",
        "bytes",
        "tokens",
        "skipped",
        "vocab_size",
        "tokenizer_sha256",
        "content_sha256",
    )
    return {key: manifest[key] for key in kept} | {
        "streams": {stream: sha256(read_stream(out, stream).tobytes()) for stream in streams}
    }


def drawn(order: str) -> str:
    """Hash of 60,000 draws from three places, among them one in a later pass and period."""
    weights, shuffle = ORDERS[order]
    made = training_order(CHUNK_TOKENS, 16, weights, shuffle, seed=5)
    parts = [made.draw(first, 20_000) for first in (0, 12_345, 1_000_003)]
    return sha256(
        np.concatenate([number for part in parts for number in part]).astype("<i8").tobytes()
    )


def shards(folder: Path) -> str:
    """A folder with three subsets, by the tests' own writer."""
    sizes = {
        "train/web": 20_000,
        "train/code": 9_000,
        "train/books": 3_000,
        "val/web": 1_500,
        "val/books": 700,
    }
    write_prepared(
        folder,
        {name: random_tokens(size, seed=size) for name, size in sizes.items()},
        chunk_tokens=2500,
    )
    return str(folder)


def batches(
    folder: str, case: str, num_workers: int, state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Hash of training batches 17 to 39, the state before them, hash of all validation batches."""
    data = TokenShards(
        folder, batch_size=4, context_length=64, num_workers=num_workers, **BATCHES[case]
    )
    data.setup()
    data.load_state_dict(state or {})
    loader = data.train_dataloader()
    digest, place = hashlib.sha256(), None
    for number, batch in zip(range(RESUMED_AT if state else 0, 40), loader, strict=False):
        if number == RESUMED_AT:
            digest = hashlib.sha256()  # of what a resumed run has
        digest.update(b"".join(tensor.numpy().tobytes() for tensor in batch[:5]))
        if number == RESUMED_AT - 1:
            place = data.state_dict()
    data.teardown("fit")
    val = b"".join(
        tensor.numpy().tobytes() for batch in data.val_dataloader() for tensor in batch[:5]
    )
    return {"train": digest.hexdigest(), "state": place, "val": sha256(val)}


STORED = json.loads(RECORD.read_text()) if RECORD.is_file() else {}


@pytest.mark.parametrize("corpus", list(CORPORA))
def test_a_corpus_is_prepared_as_it_was(corpus: str, tmp_path: Path) -> None:
    assert prepared(corpus, tmp_path) == STORED["prepared"][corpus]


@pytest.mark.parametrize("order", list(ORDERS))
def test_the_draws_are_what_they_were(order: str) -> None:
    assert drawn(order) == STORED["draws"][order]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", list(BATCHES))
def test_the_batches_are_what_they_were_also_after_a_resume(
    case: str, num_workers: int, tmp_path: Path
) -> None:
    record, folder = STORED["batches"][case], shards(tmp_path / "shards")
    made = batches(folder, case, num_workers)
    made["state"]["split"]["num_workers"] = 0
    assert made == record
    assert batches(folder, case, num_workers, record["state"])["train"] == record["train"]


def write() -> None:
    """Store what this machine makes."""
    record: dict[str, Any] = {
        "prepared": {},
        "draws": {order: drawn(order) for order in ORDERS},
        "batches": {},
    }
    for corpus in CORPORA:
        with tempfile.TemporaryDirectory() as folder:
            record["prepared"][corpus] = prepared(corpus, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        path = shards(Path(folder) / "shards")
        record["batches"] = {case: batches(path, case, num_workers=0) for case in BATCHES}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    write()
