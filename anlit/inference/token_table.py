"""Tables of scored tokens: parquet, one row per token.

| column | |
|---|---|
| document | int64, from 0, in the order of the files |
| position | int64, of the token in its document, from 0 |
| token | int32 |
| text | string, the text of the token alone; � if it is a part of a character |
| byte_start, byte_end | int64, range of the characters that the token is part of, in the document's UTF-8 bytes |
| n_context | int32, tokens of the document that the model saw before it |
| log_likelihood | float32, nats; null if nothing was before the token |
| rank | int32, 1 if no token was more probable; null if nothing was before the token |
| source | string, the file and the record that the document comes from |
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from anlit.errors import UserError
from anlit.reporting.files import replacing

SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("position", pa.int64()),
        ("token", pa.int32()),
        ("text", pa.string()),
        ("byte_start", pa.int64()),
        ("byte_end", pa.int64()),
        ("n_context", pa.int32()),
        ("log_likelihood", pa.float32()),
        ("rank", pa.int32()),
        ("source", pa.string()),
    ]
)
ROW_GROUP = 1 << 17
"""Tokens in a row group, which is written at once."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of the tokens of one document, in order; each array is (n,)."""

    tokens: np.ndarray
    log_likelihood: np.ndarray
    """float32, nats; NaN for a first token without context."""
    rank: np.ndarray
    """int32, 1 if the token was the most probable; 0 if it was not scored."""
    n_context: np.ndarray
    """int32, the number of tokens of the document that the model saw before it."""


@contextmanager
def token_table(path: Path, tokenizer: Tokenizer, record: Mapping[str, Any]) -> Iterator["TokenTable"]:
    """A parquet file that appears under its name when it is complete; an existing one is replaced.

    Args:
        record: Written as JSON into the file's metadata, under `anlit`.

    Raises:
        UserError: The file cannot be written.
    """
    if path.is_dir():
        raise UserError(f"--output {path} is a folder: give the name of a file, such as {path}/scores.parquet")
    schema = SCHEMA.with_metadata({"anlit": json.dumps(record)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            table = TokenTable(writer, tokenizer)
            yield table
            table.write()
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error.strerror or error}): name another") from error


class TokenTable:
    """The rows of a `token_table`."""

    def __init__(self, writer: pq.ParquetWriter, tokenizer: Tokenizer) -> None:
        self._writer, self._tokenizer = writer, tokenizer
        self._text_of = lru_cache(maxsize=None)(self._decode)
        self._waiting: list[pa.Table] = []

    def add(self, document: int, scores: Scores, offsets: np.ndarray, source: str) -> None:
        """Add the tokens of one document.

        Args:
            scores: The scores of n tokens.
            offsets: (n, 2) int64, their byte ranges.
            source: The origin of its text: the file, and the record in it.
        """
        n = len(scores.tokens)
        missing = np.isnan(scores.log_likelihood)
        columns = [
            pa.array(np.full(n, document, np.int64)),
            pa.array(np.arange(n, dtype=np.int64)),
            pa.array(scores.tokens.astype(np.int32)),
            pa.array([self._text_of(token) for token in scores.tokens.tolist()], pa.string()),
            *(pa.array(offsets[:, side]) for side in (0, 1)),
            pa.array(scores.n_context),
            pa.array(scores.log_likelihood, mask=missing),
            pa.array(scores.rank, mask=scores.rank == 0),
            pa.array([source] * n, pa.string()),
        ]
        self._waiting.append(pa.Table.from_arrays(columns, schema=SCHEMA))
        if sum(map(len, self._waiting)) >= ROW_GROUP:
            self.write()

    def _decode(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def write(self) -> None:
        """Write the rows that wait for their row group to be full."""
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting).cast(self._writer.schema))
            self._waiting = []


def byte_offsets(text: str, characters: Sequence[tuple[int, int]]) -> np.ndarray:
    """Ranges of UTF-8 bytes for ranges of characters, (n, 2) int64."""
    if text.isascii():
        return np.array(characters, np.int64).reshape(-1, 2)
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    return np.concatenate(([0], sizes.cumsum()))[np.array(characters, np.int64).reshape(-1, 2)]
