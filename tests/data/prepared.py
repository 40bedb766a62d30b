"""An independent writer of prepared folders (format 2), to test our reader without our writer."""

import hashlib
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

END = 0
VOCABULARY = 320
CHUNK_HEADER_BYTES = 12


def write_stream(folder: Path, tokens: np.ndarray, chunk_tokens: int) -> dict[str, int]:
    """Write chunks of `chunk_tokens` tokens and their index.json; return the counts."""
    folder.mkdir(parents=True)
    chunks = []
    for number, first in enumerate(range(0, len(tokens), chunk_tokens)):
        chunk = tokens[first : first + chunk_tokens]
        body = chunk.astype(tokens.dtype.newbyteorder("<")).tobytes()
        size = CHUNK_HEADER_BYTES + len(body)
        content = np.array([1, CHUNK_HEADER_BYTES, size], dtype="<u4").tobytes() + body
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(content)
        entry = {
            "chunk_bytes": size,
            "chunk_size": 1,
            "dim": len(chunk),
            "filename": name,
            "crc32": zlib.crc32(content),
        }
        chunks.append(entry)
    index = {"chunks": chunks, "config": {}, "updated_at": "0"}
    (folder / "index.json").write_text(json.dumps(index))
    return {
        "documents": int((tokens == END).sum()),
        "bytes": 3 * len(tokens),
        "tokens": len(tokens),
        "chunks": len(chunks),
    }


def write_prepared(
    folder: Path, streams: dict[str, np.ndarray], chunk_tokens: int = 1000, **changes: Any
) -> dict[str, np.ndarray]:
    """Write a prepared folder and return `streams`, named "train", "val" or "train/subset" …

    `changes` replace values of the manifest.
    """
    totals: Counter[str] = Counter()
    splits: dict[str, dict[str, Any]] = {}
    for name, tokens in streams.items():
        split_name, _, subset = name.partition("/")
        counts = write_stream(folder / name, tokens, chunk_tokens)
        split = splits.setdefault(split_name, dict.fromkeys(counts, 0))
        for key, count in counts.items():
            split[key] += count
        if subset:
            split.setdefault("subsets", {})[subset] = counts
        totals.update(counts)
    largest_token = max(int(tokens.max(initial=0)) for tokens in streams.values())
    manifest: dict[str, Any] = {
        **splits,
        "format_version": 2,
        "corpus": "test",
        "settings": {},
        "command": "anlit prepare Test --path data/test",
        "splits": list(splits),
        "documents": totals["documents"],
        "bytes": totals["bytes"],
        "tokens": totals["tokens"],
        "vocab_size": max(VOCABULARY, 1 + largest_token),
        "dtype": next(iter(streams.values())).dtype.name,
        "end_of_document": END,
        "document_token_at": "end",
        "tokenizer_sha256": None,
        **changes,
    }
    seal(folder, manifest)
    return streams


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the hash of its chunks and of the way to read them."""
    identity: dict[str, Any] = {
        "end_of_document": manifest["end_of_document"],
        "dtype": manifest["dtype"],
        "streams": {},
    }
    if manifest["document_token_at"] == "start":
        identity["document_token_at"] = "start"
    for index in folder.rglob("index.json"):
        chunks = json.loads(index.read_text())["chunks"]
        name = index.parent.relative_to(folder).as_posix()
        identity["streams"][name] = [(chunk["dim"], chunk["crc32"]) for chunk in chunks]
    content = json.dumps(identity, sort_keys=True).encode()
    manifest.setdefault("content_sha256", hashlib.sha256(content).hexdigest())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def random_tokens(
    n: int, seed: int, vocabulary: int = VOCABULARY, dtype: type = np.uint16
) -> np.ndarray:
    """Return random tokens; a sixtieth of them ends documents."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocabulary, n).astype(dtype)
    tokens[rng.random(n) < 1 / 60] = END
    return tokens
