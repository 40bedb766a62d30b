"""A reader of prepared folders that uses nothing of the package, and ways to damage them."""

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

COUNTS = ("documents", "bytes", "tokens")


@functools.cache
def _tokenizer(content: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is nothing but text
    return tokenizer


def encoded(
    path: str | Path, texts: Iterable[str], end_of_document: str = END_OF_DOCUMENT
) -> list[int]:
    """The stream that texts make with a tokenizer.json: each and then its end-of-document token."""
    tokenizer = _tokenizer(Path(path).read_bytes())
    end = tokenizer.token_to_id(end_of_document)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [token for encoding in encodings for token in [*encoding.ids, end]]


def by_split(texts: Iterable[str], fraction: float) -> dict[str, list[str]]:
    """The streams that texts make of which a fraction is held out: those with the smallest hashes."""
    streams: dict[str, list[str]] = {"val": [], "train": []}
    for text in texts:
        is_held_out = int(sha256(text.encode()).hexdigest()[:8], 16) < fraction * 2**32
        streams["val" if is_held_out else "train"].append(text)
    return streams


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def read_records(folder: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted((folder / "tasks").glob("0*.json"))]


def read_files(folder: Path) -> dict[str, dict[str, Any]]:
    """What the records say of each source file; of a file in parts, the counts of all and the last part's hash."""
    files: dict[str, dict[str, Any]] = {}
    for piece in (piece for record in read_records(folder) for piece in record["files"]):
        before = files.get(piece["name"], {})
        files[piece["name"]] = piece | {key: before.get(key, 0) + piece[key] for key in COUNTS}
    return files


def read_stream(folder: Path, stream: str) -> np.ndarray:
    """All tokens of one stream ("val", "train/RedPajamaC4"); its index and its chunks are checked."""
    index = read_json(folder / stream / "index.json")
    number = int(index["config"]["data_format"][0].removeprefix("no_header_numpy:"))
    dtype = {5: np.dtype("<u2"), 2: np.dtype("<i4")}[number]
    parts = []
    for chunk in index["chunks"]:
        content = (folder / stream / chunk["filename"]).read_bytes()
        assert (
            struct.unpack("<3I", content[:12])
            == (chunk["chunk_size"], 12, len(content))
            == (1, 12, len(content))
        )
        assert (chunk["chunk_bytes"], chunk["crc32"]) == (len(content), zlib.crc32(content))
        parts.append(np.frombuffer(content[12:], dtype))
        assert len(parts[-1]) == chunk["dim"] > 0
    return np.concatenate(parts)


def read_texts(folder: Path, stream: str) -> list[str]:
    tokens = read_stream(folder, stream)
    tokenizer = _tokenizer((folder / "tokenizer.json").read_bytes())
    ends = np.flatnonzero(tokens == tokenizer.token_to_id(END_OF_DOCUMENT))
    assert ends[-1] == len(tokens) - 1
    return tokenizer.decode_batch([part[:-1].tolist() for part in np.split(tokens, ends[:-1] + 1)])


def assert_holds(folder: Path, expected: Mapping[str, Sequence[str]]) -> None:
    """The folder holds these texts in these streams, in this order, and everything it says about them is true."""
    manifest = read_json(folder / "manifest.json")
    there = {"manifest.json", "tokenizer.json", "tasks/plan.json"}
    there |= {f"tasks/{task:06d}.json" for task in range(manifest["tasks"])}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for stream, texts in expected.items():
        tokens = encoded(folder / "tokenizer.json", texts)
        assert read_stream(folder, stream).tolist() == tokens, stream
        chunks = [
            chunk["filename"] for chunk in read_json(folder / stream / "index.json")["chunks"]
        ]
        there |= {f"{stream}/{name}" for name in [*chunks, "index.json"]}
        size = sum(len(text.encode()) for text in texts)
        numbers = {
            "documents": len(texts),
            "bytes": size,
            "tokens": len(tokens),
            "chunks": len(chunks),
        }
        split, _, subset = stream.partition("/")
        assert not subset or manifest[split]["subsets"][subset] == numbers
        counts[""].update(numbers)
        counts[split].update(numbers)
    assert {*counts} == {"", *manifest["splits"]}
    for split, numbers in counts.items():
        assert numbers.items() <= (manifest[split] if split else manifest).items()
    for key in COUNTS:
        assert sum(file[key] for file in read_files(folder).values()) == counts[""][key]
    assert set(hashes(folder)) == there


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, and "" for every empty folder.

    The lock file and the times of the source files are left out.
    """
    names = (".prepare.lock", "sources.json")
    paths = [path for path in folder.rglob("*") if path.name not in names]
    contents = {path: sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    contents |= {path: "" for path in paths if path.is_dir() and not any(path.iterdir())}
    return {path.relative_to(folder).as_posix(): content for path, content in contents.items()}


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a JSON file in place."""
    content = read_json(path)
    change(content)
    path.write_text(json.dumps(content))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
