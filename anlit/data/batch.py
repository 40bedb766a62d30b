"""What the models are fed: tokens, their targets and the documents they belong to.

Legend: B sequences in a micro-batch, T context length. Shards are read in blocks of T + 1 tokens,
so that every position of a sequence has its next token as target.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the target that cross_entropy leaves out, PyTorch's default

TokenAt = Literal["end", "start"]


class Batch(NamedTuple):
    """One micro-batch. Everything about packing (positions, masks) is derived from `document_ids`."""

    tokens: Tensor
    """(B, T) int64."""
    targets: Tensor
    """(B, T) int64: the next token, or -100 where it is not counted in the loss."""
    document_ids: Tensor
    """(B, T) int64, from 0 and non-decreasing in each row; equal ids in a row are one document."""


def document_ids(tokens: Tensor, end_of_document: int, token_at: TokenAt = "end") -> Tensor:
    """Number of document boundaries before each position.

    Args:
        tokens: (B, T) int64.
        end_of_document: id of the token that separates documents.
        token_at: "end" if that token is the last of its document, "start" if it is the first
            (FineWeb's .bin files).

    Returns:
        (B, T) int64, 0 at the first position of every row, non-decreasing.
    """
    separator = tokens == end_of_document
    count = separator.cumsum(dim=1)
    if token_at == "end":
        return count - separator.long()
    return count - separator[:, :1].long()


def batch_from_blocks(
    blocks: Tensor, end_of_document: int, token_at: TokenAt = "end", score_first_token: bool = True
) -> Batch:
    """Shift blocks of T + 1 consecutive tokens into inputs and targets.

    Args:
        blocks: (B, T + 1) integers.
        end_of_document: id of the token that separates documents.
        token_at: whether that token ends or starts its document, see `document_ids`.
        score_first_token: False takes a target out of the loss where it is the first token of
            another document than its input token: nothing before it tells what that document is.
    """
    blocks = blocks.long()
    ids = document_ids(blocks, end_of_document, token_at)
    targets = blocks[:, 1:]
    if not score_first_token:
        targets = targets.masked_fill(ids[:, 1:] != ids[:, :-1], IGNORED)
    return Batch(blocks[:, :-1].contiguous(), targets.contiguous(), ids[:, :-1].contiguous())


class BlockCollate:
    """Collate function of the loaders: a list of (T + 1,) arrays becomes a `Batch`. Picklable."""

    def __init__(self, end_of_document: int, token_at: TokenAt = "end", score_first_token: bool = True) -> None:
        self.end_of_document = end_of_document
        self.token_at = token_at
        self.score_first_token = score_first_token

    def __call__(self, blocks: list) -> Batch:
        stacked = torch.stack([torch.as_tensor(block).long() for block in blocks])
        return batch_from_blocks(stacked, self.end_of_document, self.token_at, self.score_first_token)
