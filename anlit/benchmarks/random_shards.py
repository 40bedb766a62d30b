"""A prepared folder of random tokens, as large as wanted, to read from."""

import hashlib
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from anlit.data.shards import FORMAT_VERSION, INDEX, MANIFEST, read_manifest
from anlit.errors import UserError

CORPUS = "random tokens"
VOCAB_SIZE, END_OF_DOCUMENT = 50257, 50256
DOCUMENT_TOKENS = 1000  # on average
CHUNK_TOKENS = 1 << 25  # 64 MiB, as in folders that `anlit prepare` makes
VAL_TOKENS = 1 << 20
HEADER = np.dtype("<u4")
LITDATA_UINT16 = 5  # its number for the type, in an index's data_format


def random_shards(folder: Path, n_tokens: int, seed: int = 0) -> dict[str, Any]:
    """Make `folder` a prepared folder with `n_tokens` random training tokens, or find that it is.

    Returns:
        The manifest.

    Raises:
        UserError: the folder holds something else.
    """
    settings = {"tokens": n_tokens, "seed": seed, "chunk_tokens": CHUNK_TOKENS}
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(str(folder))
        if (manifest["corpus"], manifest["settings"]) != (CORPUS, settings):
            raise UserError(f"{folder} holds other data than this benchmark's: set --folder to another folder.")
        return manifest
    shutil.rmtree(folder, ignore_errors=True)  # a rest of an interrupted attempt
    rng = np.random.default_rng(seed)
    digest = hashlib.sha256()
    splits: dict[str, dict[str, Any]] = {}
    for split, size in (("train", n_tokens), ("val", VAL_TOKENS)):
        chunks = []
        (folder / split).mkdir(parents=True)
        documents = 0
        for number, start in enumerate(range(0, size, CHUNK_TOKENS)):
            tokens = rng.integers(0, END_OF_DOCUMENT, min(CHUNK_TOKENS, size - start), dtype="<u2")
            tokens[rng.integers(0, len(tokens), -(-len(tokens) // DOCUMENT_TOKENS))] = END_OF_DOCUMENT
            documents += int((tokens == END_OF_DOCUMENT).sum())
            chunks.append(_write_chunk(folder / split / f"chunk-000000-{number:04d}.bin", tokens))
            digest.update(tokens.data)
        (folder / split / INDEX).write_text(json.dumps({"chunks": chunks, "config": _config(chunks)}, sort_keys=True))
        splits[split] = {"documents": documents, "bytes": None, "tokens": size, "chunks": len(chunks)}
    manifest = {
        "format_version": FORMAT_VERSION,
        "corpus": CORPUS,
        "settings": settings,
        "command": "anlit benchmark data",
        **{key: sum(part[key] for part in splits.values()) for key in ("documents", "tokens")},
        "bytes": None,
        "splits": list(splits),
        **splits,
        "skipped": {},
        "vocab_size": VOCAB_SIZE,
        "dtype": "uint16",
        "end_of_document": END_OF_DOCUMENT,
        "document_token_at": "end",
        "tokenizer_sha256": None,
        "content_sha256": digest.hexdigest(),
        "versions": {"numpy": np.__version__},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _write_chunk(path: Path, tokens: np.ndarray) -> dict[str, Any]:
    start = 3 * HEADER.itemsize
    header = np.array([1, start, start + tokens.nbytes], dtype=HEADER).tobytes()
    with path.open("wb") as file:
        file.write(header)
        file.write(tokens.data)
    return {
        "chunk_bytes": len(header) + tokens.nbytes,
        "chunk_size": 1,
        "dim": len(tokens),
        "filename": path.name,
        "crc32": zlib.crc32(tokens.data, zlib.crc32(header)),
    }


def _config(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The part of an index that litdata needs to read the chunks by itself."""
    return {
        "chunk_bytes": max(chunk["chunk_bytes"] for chunk in chunks),
        "chunk_size": None,
        "compression": None,
        "data_format": [f"no_header_numpy:{LITDATA_UINT16}"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "encryption": None,
        "item_loader": "TokensLoader",
    }
