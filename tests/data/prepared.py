"""Prepared folders of format 2 by a writer of their own, so that the reader is not tested against our writer."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

END = 0
VOCABULARY = 320


def write_stream(folder: Path, tokens: np.ndarray, chunk_tokens: int) -> dict[str, Any]:
    """Chunks of `chunk_tokens` tokens and their index.json; the counts for the manifest."""
    folder.mkdir(parents=True)
    chunks = []
    for number, first in enumerate(range(0, len(tokens), chunk_tokens)):
        body = tokens[first : first + chunk_tokens].astype(tokens.dtype.newbyteorder("<")).tobytes()
        content = np.array([1, 12, 12 + len(body)], dtype="<u4").tobytes() + body
        name, size = f"chunk-0-{number}.bin", {"chunk_bytes": len(content), "chunk_size": 1}
        (folder / name).write_bytes(content)
        chunks.append(
            {
                **size,
                "dim": len(body) // tokens.itemsize,
                "filename": name,
                "crc32": zlib.crc32(content),
            }
        )
    (folder / "index.json").write_text(
        json.dumps({"chunks": chunks, "config": {}, "updated_at": "0"})
    )
    documents = int((tokens == END).sum())
    return {
        "documents": documents,
        "bytes": 3 * len(tokens),
        "tokens": len(tokens),
        "chunks": len(chunks),
    }


def write_prepared(
    folder: Path, streams: dict[str, np.ndarray], chunk_tokens: int = 1000, **changes: Any
) -> dict[str, np.ndarray]:
    """A prepared folder; `streams` are named "train", "val" or "train/subset" …; returned as they were given."""
    splits: dict[str, dict[str, Any]] = {}
    for name, tokens in streams.items():
        split, _, subset = name.partition("/")
        counts = write_stream(folder / name, tokens, chunk_tokens)
        whole = splits.setdefault(split, dict.fromkeys(counts, 0))
        whole |= {key: whole[key] + value for key, value in counts.items()}
        if subset:
            whole.setdefault("subsets", {})[subset] = counts
    manifest: dict[str, Any] = {
        **splits, "format_version": 2, "corpus": "test", "settings": {},
        "command": "anlit prepare Test --path data/test", "splits": list(splits),
        **{key: sum(counts[key] for counts in splits.values()) for key in ("documents", "bytes", "tokens")},
        "vocab_size": max(VOCABULARY, 1 + max(int(tokens.max(initial=0)) for tokens in streams.values())),
        "dtype": next(iter(streams.values())).dtype.name, "end_of_document": END, "document_token_at": "end",
        "tokenizer_sha256": None, **changes,
    }  # fmt: skip
    seal(folder, manifest)
    return streams


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the hash of what each index.json lists and of how it is read."""
    identity: dict[str, Any] = {key: manifest[key] for key in ("end_of_document", "dtype")}
    if manifest["document_token_at"] == "start":
        identity["document_token_at"] = "start"
    identity["streams"] = {}
    for index in folder.rglob("index.json"):
        chunks = json.loads(index.read_text())["chunks"]
        name = index.parent.relative_to(folder).as_posix()
        identity["streams"][name] = [(chunk["dim"], chunk["crc32"]) for chunk in chunks]
    content = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    manifest.setdefault("content_sha256", content)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def random_tokens(
    n: int, seed: int, vocabulary: int = VOCABULARY, dtype: type = np.uint16
) -> np.ndarray:
    """Tokens with an end of document now and then."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocabulary, n).astype(dtype)
    tokens[rng.random(n) < 1 / 60] = END
    return tokens
