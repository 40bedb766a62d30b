"""Source files of every format with the same records, and what was read from them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from anlit.data.preparation.formats import Columns, Record, parts_of, read_file

SUBSET = "meta.redpajama_set_name"
COLUMNS = Columns(subset=SUBSET)
TEXTS = [
    *(f"document {number}\nwith {'many ' * (number % 30)}words" for number in range(200)),
    "größe 漢字 🦜 \u2028 \u0085 \x00 \r\n",
    "<|endoftext|>",
    "\ufeff",
    " ",
    "long " * 100_000,
    "last",
]


def subset_of(number: int) -> str:
    return f"RedPajama{number % 3}"


def json_line(number: int, text: str) -> bytes:
    record = {"text": text, "meta": {"redpajama_set_name": subset_of(number)}}
    return json.dumps(record, ensure_ascii=number % 2 == 0).encode() + b"\n"


def write_json_lines(path: Path) -> None:
    path.write_bytes(b"".join(json_line(number, text) for number, text in enumerate(TEXTS)))


def write_zstd(path: Path) -> None:
    """Two frames, the first without its size, and a line that begins in one and ends in the other."""
    data = b"".join(json_line(number, text) for number, text in enumerate(TEXTS))
    compressor = zstandard.ZstdCompressor().compressobj()
    first = compressor.compress(data[:5000]) + compressor.flush()
    path.write_bytes(first + zstandard.ZstdCompressor(write_checksum=True).compress(data[5000:]))


def parquet_table(text_type: pa.DataType | None = None) -> pa.Table:
    names = [{"redpajama_set_name": subset_of(number), "other": number} for number in range(len(TEXTS))]
    return pa.table({"id": list(range(len(TEXTS))), "meta": names, "text": pa.array(TEXTS, text_type or pa.string())})


def write_parquet(path: Path) -> None:
    pq.write_table(parquet_table(), path, row_group_size=30)


def write_gzip(path: Path) -> None:
    """Two members, and a line that begins in one and ends in the other."""
    data = b"".join(json_line(number, text) for number, text in enumerate(TEXTS))
    path.write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))


WRITERS: dict[str, Callable[[Path], None]] = {
    ".jsonl": write_json_lines,
    ".jsonl.zst": write_zstd,
    ".json.gz": write_gzip,
    ".parquet": write_parquet,
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.zst": zstandard.compress,
    ".jsonl.gz": gzip.compress,
}


def records(path: Path, columns: Columns = COLUMNS, part_bytes: int = 1 << 30) -> list[Record]:
    """Of all parts of a file, one after the other."""
    parts = parts_of(path.name, path.stat().st_size, part_bytes)
    return [record for part in range(parts) for record in read_file(path.name, path, columns, part, parts)]


def problems(found: list[Record]) -> list[tuple[str, str]]:
    return [(record.where, record.problem) for record in found if record.problem is not None]
