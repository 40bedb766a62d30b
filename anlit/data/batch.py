"""The input of the models: tokens, their targets and the documents they belong to.

Legend: B sequences in a micro-batch, T context length, N = B·T.

Shards are read in blocks of T + 1 tokens: every position of a sequence has the next token as
target. The host makes the batches, so that nobody has to ask the device about packing.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anlit.nn.layers.cross_entropy import IGNORE_INDEX

TokenAt = Literal["end", "start"]


class Batch(NamedTuple):
    """One micro-batch."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64: the next token, or -100 if it does not count in the loss
    document_ids: Tensor  # (B, T) int64, from 0, non-decreasing in each row; equal in a document
    positions: Tensor  # (B, T) int64: position in the document, 0 where a row or document begins
    cu_seqlens: Tensor
    """(documents + 1,) int32: where each document begins in the N flattened tokens, and N.

    No document spans rows. Kernels for sequences of varying length take this array.
    """
    longest: int  # tokens of the longest document; such kernels read it on the host

    def split(self, length: int) -> "Batch":
        """Return the same tokens as B·T/length sequences of `length`, which has to divide T.

        A cut divides a document into two. The second does not attend to the first.
        """
        assert self.tokens.shape[1] % length == 0, (self.tokens.shape, length)
        tokens = self.tokens.reshape(-1, length)
        targets = self.targets.reshape(-1, length)
        ids = self.document_ids.reshape(-1, length)
        batch = _pack(tokens, targets, ids - ids[:, :1])
        return batch.pin_memory() if self.tokens.is_pinned() else batch

    def in_rows(self, rows: int) -> Iterator["Batch"]:
        """Yield the same sequences in batches of at most `rows`."""
        for first in range(0, len(self.tokens), rows):
            rows_of_batch = slice(first, first + rows)
            yield _pack(
                self.tokens[rows_of_batch],
                self.targets[rows_of_batch],
                self.document_ids[rows_of_batch],
            )

    def pin_memory(self) -> "Batch":
        """Return a copy in page-locked memory, which the device reads while the host continues."""
        return Batch(
            self.tokens.pin_memory(),
            self.targets.pin_memory(),
            self.document_ids.pin_memory(),
            self.positions.pin_memory(),
            self.cu_seqlens.pin_memory(),
            self.longest,
        )


def document_ids(tokens: np.ndarray, end_of_document: int, token_at: TokenAt = "end") -> np.ndarray:
    """Return the number of document boundaries before each of (B, T) tokens.

    The result is (B, T) int64, from 0 and non-decreasing in each row. `end_of_document` is the last
    token of its document, or with `token_at="start"` (FineWeb's .bin files) the first.
    """
    is_separator = tokens == end_of_document
    boundaries = is_separator.cumsum(axis=1, dtype=np.int64)
    if token_at == "end":
        return boundaries - is_separator
    return boundaries - is_separator[:, :1]


def _pack(tokens: Tensor, targets: Tensor, ids: Tensor) -> Batch:
    """Return the batch of (B, T) tokens, targets and document ids."""
    id_array = ids.numpy()
    is_first = np.ones(id_array.shape, dtype=bool)
    np.not_equal(id_array[:, 1:], id_array[:, :-1], out=is_first[:, 1:])
    bounds = np.append(np.flatnonzero(is_first), id_array.size)
    lengths = np.diff(bounds)
    positions = np.arange(id_array.size) - np.repeat(bounds[:-1], lengths)
    return Batch(
        tokens,
        targets,
        ids,
        torch.from_numpy(positions.reshape(id_array.shape)),
        torch.from_numpy(bounds.astype(np.int32)),
        int(lengths.max(initial=0)),
    )


def one_document_per_row(tokens: Tensor, targets: Tensor) -> Batch:
    """Return the batch of (B, T) int64 tokens and targets whose rows are a document each."""
    batch = _pack(tokens, targets, torch.zeros(tokens.shape, dtype=torch.int64))
    return batch.pin_memory() if tokens.is_pinned() else batch


def batch_from_blocks(
    blocks: Tensor | np.ndarray,
    end_of_document: int,
    token_at: TokenAt = "end",
    score_first_token: bool = True,
    n_targets: np.ndarray | None = None,
) -> Batch:
    """Shift blocks of T + 1 consecutive tokens into inputs and targets.

    Args:
        blocks: (B, T + 1) integers on the host.
        end_of_document: as in `document_ids`.
        token_at: as in `document_ids`.
        score_first_token: whether the first token of a document counts in the loss if its input
            token belongs to another document. Nothing before it predicts a new document.
        n_targets: (B,) how many targets of each row count, from the first on. By default all.
    """
    blocks = np.asarray(blocks)
    ids = document_ids(blocks, end_of_document, token_at)
    tokens = blocks[:, :-1].astype(np.int64)
    targets = blocks[:, 1:].astype(np.int64)
    if not score_first_token:
        targets[ids[:, 1:] != ids[:, :-1]] = IGNORE_INDEX
    if n_targets is not None:
        targets[np.arange(targets.shape[1]) >= n_targets[:, None]] = IGNORE_INDEX
    input_ids = np.ascontiguousarray(ids[:, :-1])
    return _pack(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(input_ids))
