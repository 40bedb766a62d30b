"""What the models are fed: tokens, their targets and the documents they belong to.

Legend: B sequences in a micro-batch, T context length, N = B·T. Shards are read in blocks of T + 1 tokens, so that
every position of a sequence has its next token as target. A batch is made on the host, so that nobody has to ask the
device about packing and wait for it.
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
    targets: Tensor  # (B, T) int64: the next token, or -100 where it is not counted in the loss
    document_ids: Tensor  # (B, T) int64, from 0 and non-decreasing in each row; equal ids in a row are one document
    positions: Tensor  # (B, T) int64: each token's place in its document, 0 where a row or a document begins
    cu_seqlens: Tensor
    """(documents + 1,) int32: where each document begins in the N flattened tokens, and N at the end. No document
    spans rows. It is what kernels for sequences of varying length take."""
    longest: int  # tokens of the longest document; on the host, where such kernels ask for it

    def split(self, length: int) -> "Batch":
        """The same tokens as B·T/length sequences of `length`, which has to divide T.

        The part of a document after a cut is a document of its own, which does not see the part before it.
        """
        assert self.tokens.shape[1] % length == 0, (self.tokens.shape, length)
        tokens, targets, ids = (tensor.reshape(-1, length) for tensor in self[:3])
        ids = ids - ids[:, :1]
        batch = Batch(tokens, targets, ids, *_packing(ids.numpy()))
        return batch.pin_memory() if self.tokens.is_pinned() else batch

    def in_rows(self, rows: int) -> Iterator["Batch"]:
        """The same sequences in batches of at most `rows`."""
        for tokens, targets, ids in zip(*(tensor.split(rows) for tensor in self[:3]), strict=True):
            yield Batch(tokens, targets, ids, *_packing(ids.numpy()))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory, from which the device copies while the host continues."""
        tokens, targets, ids, positions, cu_seqlens = (tensor.pin_memory() for tensor in self[:5])
        return Batch(tokens, targets, ids, positions, cu_seqlens, self.longest)


def document_ids(tokens: np.ndarray, end_of_document: int, token_at: TokenAt = "end") -> np.ndarray:
    """Number of document boundaries before each of (B, T) tokens: (B, T) int64, from 0, non-decreasing in each row.

    The token `end_of_document` is the last of its document; with `token_at="start"` (FineWeb's .bin files) the first.
    """
    separator = tokens == end_of_document
    return separator.cumsum(axis=1, dtype=np.int64) - (
        separator if token_at == "end" else separator[:, :1]
    )


def _packing(ids: np.ndarray) -> tuple[Tensor, Tensor, int]:
    """`positions`, `cu_seqlens` and `longest` of a batch with these document ids, (B, T)."""
    begins = np.ones(ids.shape, dtype=bool)
    np.not_equal(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
    bounds = np.append(np.flatnonzero(begins), ids.size)
    lengths = np.diff(bounds)
    positions = np.arange(ids.size) - np.repeat(bounds[:-1], lengths)
    cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
    return torch.from_numpy(positions.reshape(ids.shape)), cu_seqlens, int(lengths.max(initial=0))


def batch_from_blocks(
    blocks: Tensor | np.ndarray, end_of_document: int, token_at: TokenAt = "end", score_first_token: bool = True,
    n_targets: np.ndarray | None = None,
) -> Batch:  # fmt: skip
    """Shift blocks of T + 1 consecutive tokens, (B, T + 1) integers on the host, into inputs and targets.

    `score_first_token=False` takes a target out of the loss where it is the first token of another document than its
    input token: nothing before it tells what that document is. `n_targets`, (B,), is how many targets of each row
    count, the first ones; by default all. For the others see `document_ids`.
    """
    blocks = np.asarray(blocks)
    ids = document_ids(blocks, end_of_document, token_at)
    tokens, targets = blocks[:, :-1].astype(np.int64), blocks[:, 1:].astype(np.int64)
    if not score_first_token:
        targets[ids[:, 1:] != ids[:, :-1]] = IGNORE_INDEX
    if n_targets is not None:
        targets[np.arange(targets.shape[1]) >= n_targets[:, None]] = IGNORE_INDEX
    ids = np.ascontiguousarray(ids[:, :-1])
    return Batch(
        torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(ids), *_packing(ids)
    )
