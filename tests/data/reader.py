"""An independent reader of prepared folders, and ways to damage them."""

import functools
import json
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.data.layouts import END_OF_DOCUMENT

COUNT_KEYS = ("documents", "bytes", "tokens")
DTYPES = {5: np.dtype("<u2"), 2: np.dtype("<i4")}
"""By the number in the data_format of an index."""
NOT_HASHED = (".prepare.lock", "sources.json")
"""The lock file and the times of the source files."""


@functools.cache
def _tokenizer(content: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is encoded as letters
    return tokenizer


def encoded(
    path: str | Path, texts: Iterable[str], end_of_document: str = END_OF_DOCUMENT
) -> list[int]:
    """Return the tokens of all texts, each followed by the end-of-document token."""
    tokenizer = _tokenizer(Path(path).read_bytes())
    end = tokenizer.token_to_id(end_of_document)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    tokens: list[int] = []
    for encoding in encodings:
        tokens += [*encoding.ids, end]
    return tokens


def by_split(texts: Iterable[str], fraction: float) -> dict[str, list[str]]:
    """Return the texts by split; a fraction with the smallest hashes is held out for validation."""
    streams: dict[str, list[str]] = {"val": [], "train": []}
    for text in texts:
        first_digits = sha256(text.encode()).hexdigest()[:8]
        share = int(first_digits, 16) / 16**8
        split = "val" if share < fraction else "train"
        streams[split].append(text)
    return streams


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted((folder / "tasks").glob("0*.json"))]


def read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the record of each source file.

    If a file has several pieces, the counts are their sums and the hash is the last piece's.
    """
    files: dict[str, dict[str, Any]] = {}
    for record in read_records(folder):
        for piece in record["files"]:
            name = piece["name"]
            file = dict(piece)
            earlier_pieces = files.get(name, {})
            for key in COUNT_KEYS:
                file[key] += earlier_pieces.get(key, 0)
            files[name] = file
    return files


def read_stream(folder: Path, stream: str) -> np.ndarray:
    """Return all tokens of a stream ("val", "train/RedPajamaC4"); check its index and chunks."""
    index = read_json(folder / stream / "index.json")
    (data_format,) = index["config"]["data_format"]
    number = int(data_format.removeprefix("no_header_numpy:"))
    dtype = DTYPES[number]
    arrays = []
    for chunk in index["chunks"]:
        content = (folder / stream / chunk["filename"]).read_bytes()
        header = struct.unpack("<3I", content[:12])
        array = np.frombuffer(content[12:], dtype)
        assert header == (1, 12, len(content))
        assert chunk["chunk_size"] == 1
        assert chunk["chunk_bytes"] == len(content)
        assert chunk["crc32"] == zlib.crc32(content)
        assert chunk["dim"] == len(array) > 0
        arrays.append(array)
    return np.concatenate(arrays)


def read_texts(folder: Path, stream: str) -> list[str]:
    tokens = read_stream(folder, stream)
    tokenizer = _tokenizer((folder / "tokenizer.json").read_bytes())
    ends = np.flatnonzero(tokens == tokenizer.token_to_id(END_OF_DOCUMENT))
    assert ends[-1] == len(tokens) - 1
    documents = np.split(tokens, ends[:-1] + 1)
    return tokenizer.decode_batch([document[:-1].tolist() for document in documents])


def all_texts(folder: Path) -> list[str]:
    """Return the texts of training and validation, sorted."""
    return sorted(read_texts(folder, "train") + read_texts(folder, "val"))


def assert_holds(folder: Path, expected: Mapping[str, Sequence[str]]) -> None:
    """Assert that the folder holds only these texts, in these streams and in this order.

    Its manifest, indexes and records have to be true.
    """
    manifest = read_json(folder / "manifest.json")
    names = {"manifest.json", "tokenizer.json", "tasks/plan.json"}
    names |= {f"tasks/{task:06d}.json" for task in range(manifest["tasks"])}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    texts_of_split: dict[str, list[str]] = defaultdict(list)
    for stream, texts in expected.items():
        tokens = encoded(folder / "tokenizer.json", texts)
        assert read_stream(folder, stream).tolist() == tokens, stream
        index = read_json(folder / stream / "index.json")
        chunks = [chunk["filename"] for chunk in index["chunks"]]
        names |= {f"{stream}/{name}" for name in [*chunks, "index.json"]}
        numbers = {
            "documents": len(texts),
            "bytes": len("".join(texts).encode()),
            "tokens": len(tokens),
            "chunks": len(chunks),
        }
        split, _, subset = stream.partition("/")
        if subset:
            described = {**numbers, "text_sha256": text_sha256(texts)}
            assert manifest[split]["subsets"][subset] == described
        texts_of_split[""] += texts
        texts_of_split[split] += texts
        counts[""].update(numbers)
        counts[split].update(numbers)
    assert {*counts} == {"", *manifest["splits"]}
    for split, numbers in counts.items():
        recorded = manifest[split] if split else manifest
        assert numbers.items() <= recorded.items()
        assert recorded["text_sha256"] == text_sha256(texts_of_split[split])
    for key in COUNT_KEYS:
        count_of_files = sum(file[key] for file in read_files(folder).values())
        assert count_of_files == counts[""][key]
    assert set(hashes(folder)) == names


def text_sha256(texts: Iterable[str]) -> str:
    """Return the sum of the SHA-256 of texts modulo 2²⁵⁶, byte by byte."""
    digits = [0] * 32
    for text in texts:
        digest = sha256(text.encode()).digest()
        carry = 0
        for place in range(31, -1, -1):
            total = digits[place] + digest[place] + carry
            digits[place] = total % 256
            carry = total // 256
    return bytes(digits).hex()


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file under a folder, and "" for every empty folder.

    Files in `NOT_HASHED` are left out.
    """
    content_hashes = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.name in NOT_HASHED:
            continue
        if path.is_file():
            content_hashes[name] = sha256(path.read_bytes()).hexdigest()
        elif path.is_dir() and not any(path.iterdir()):
            content_hashes[name] = ""
    return content_hashes


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a JSON file in place."""
    content = read_json(path)
    change(content)
    path.write_text(json.dumps(content))


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
