"""The parquet table that `anlit score` writes, a row for each token."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anlit.errors import UserError
from anlit.evaluation.scoring import Scores
from anlit.io.write import replacing

# fmt: off
SCHEMA = pa.schema({
    "document": pa.int64(),          # from 0, in the order of the files
    "position": pa.int64(),          # of the token in its document, from 0
    "token": pa.int32(),
    "text": pa.string(),             # characters that the token completes; joined: the document
    "byte_start": pa.int64(),        # range in the document's UTF-8 bytes of all characters that
    "byte_end": pa.int64(),          # the token is a part of
    "n_context": pa.int32(),         # tokens of the document that the model saw before it
    "log_likelihood": pa.float32(),  # nats; null if nothing was before the token
    "rank": pa.int32(),              # 1 for the most probable; null if nothing was before the token
    "source": pa.string(),           # the file and the record that the document comes from
})
# fmt: on
ROW_GROUP = 1 << 17
"""Tokens in a row group, which is written at once."""


class ScoredText(NamedTuple):
    """A scored document of n tokens, for the table."""

    scores: Scores
    text: str
    byte_ranges: np.ndarray
    """The bytes of each token in the text, (n, 2) int64."""
    source: str
    """The file, and the record in it."""


def write_table(path: Path, record: Mapping[str, Any], documents: Iterable[ScoredText]) -> None:
    """Write a parquet file. It appears when it is complete, and replaces an existing file.

    Args:
        path: A name that ends in .parquet.
        record: Written as JSON into the file's metadata, under `anlit`.
        documents: The rows, document by document.

    Raises:
        UserError: The file cannot be written.
    """
    if path.is_dir():
        raise UserError(
            f"--output {path} is a folder: give the name of a file, such as {path}/scores.parquet"
        )
    if path.suffix != ".parquet":
        raise UserError(f"--output {path} would hold parquet: give a name that ends in .parquet")
    schema = SCHEMA.with_metadata({"anlit": json.dumps(record)})
    row_group: list[pa.Table] = []
    n_rows = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as partial,
            partial.open("wb") as file,  # pyarrow takes no name that is not UTF-8
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for number, document in enumerate(documents):
                columns = _columns(number, document)
                row_group.append(pa.Table.from_pydict(columns, schema=schema))
                n_rows += len(document.scores.tokens)
                if n_rows >= ROW_GROUP:
                    writer.write_table(pa.concat_tables(row_group))
                    row_group = []
                    n_rows = 0
            if row_group:
                writer.write_table(pa.concat_tables(row_group))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--output {path} cannot be written ({reason}): name another") from error


def _columns(number: int, document: ScoredText) -> dict[str, Any]:
    """The columns of `SCHEMA` for a document."""
    scores = document.scores
    n_tokens = len(scores.tokens)
    has_no_score = scores.rank == 0
    return {
        "document": np.full(n_tokens, number),
        "position": np.arange(n_tokens),
        "token": scores.tokens,
        "text": _split_text(document.text, document.byte_ranges),
        "byte_start": document.byte_ranges[:, 0],
        "byte_end": document.byte_ranges[:, 1],
        "n_context": scores.n_context,
        "log_likelihood": pa.array(scores.log_likelihood, mask=has_no_score),
        "rank": pa.array(scores.rank, mask=has_no_score),
        "source": [document.source] * n_tokens,
    }


def _split_text(text: str, byte_ranges: np.ndarray) -> list[str]:
    """Cut the text after the last character that each token completes.

    The next token may begin within a character.
    """
    content = text.encode()
    cuts = np.maximum.accumulate(np.minimum(byte_ranges[:-1, 1], byte_ranges[1:, 0]))
    bounds = [0, *cuts.tolist(), len(content)]
    return [content[begin:end].decode() for begin, end in pairwise(bounds)]


def to_byte_ranges(text: str, character_ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Convert ranges of characters to ranges of UTF-8 bytes, (n, 2) int64."""
    ranges = np.array(character_ranges, np.int64).reshape(-1, 2)
    if text.isascii():
        return ranges
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    byte_offsets = np.concatenate(([0], sizes.cumsum()))
    return byte_offsets[ranges]
