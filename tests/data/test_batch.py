"""Documents and targets of packed blocks, worked out by hand. Token 0 ends a document.

Rows are written as texts. A target that does not count is `-`.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from anlit.data.batch import TokenAt, batch_from_blocks
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import IGNORE_INDEX

CPU = torch.device("cpu")


def blocks_of(*rows: str) -> np.ndarray:
    """The blocks with these tokens, (B, T + 1)."""
    return np.array([row.split() for row in rows], dtype=np.int32)


def rows_of(tensor: Tensor) -> list[str]:
    """Each row of a tensor (B, T) as a text."""
    rows = []
    for row in tensor.tolist():
        rows.append(" ".join("-" if value == IGNORE_INDEX else str(value) for value in row))
    return rows


BLOCKS = blocks_of(
    "5 6 0 7 0 0 8 9",
    "1 2 3 4 5 6 7 0",
)


def test_targets_are_the_next_tokens() -> None:
    batch = batch_from_blocks(BLOCKS, end_of_document=0)

    assert rows_of(batch.tokens) == [
        "5 6 0 7 0 0 8",
        "1 2 3 4 5 6 7",
    ]
    assert rows_of(batch.targets) == [
        "6 0 7 0 0 8 9",
        "2 3 4 5 6 7 0",
    ]


def test_a_document_has_the_token_that_ends_it() -> None:
    batch = batch_from_blocks(BLOCKS, end_of_document=0)

    assert rows_of(batch.document_ids) == [
        "0 0 0 1 1 2 3",
        "0 0 0 0 0 0 0",
    ]
    assert rows_of(batch.positions) == [
        "0 1 2 0 1 0 0",
        "0 1 2 3 4 5 6",
    ]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 14]
    assert batch.longest == 7


def test_tensors_are_whole_numbers_in_one_piece_of_memory() -> None:
    batch = batch_from_blocks(BLOCKS, end_of_document=0)

    for tensor in (batch.tokens, batch.targets, batch.document_ids, batch.positions):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.is_contiguous()


def test_a_document_has_the_token_that_starts_it() -> None:
    batch = batch_from_blocks(BLOCKS, end_of_document=0, token_at="start")

    assert rows_of(batch.document_ids) == [
        "0 0 1 1 2 3 3",
        "0 0 0 0 0 0 0",
    ]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 14]


def test_a_row_that_begins_with_a_document_begins_with_number_0() -> None:
    blocks = blocks_of("0 5 0 6")

    batch = batch_from_blocks(blocks, end_of_document=0, token_at="start")

    assert rows_of(batch.document_ids) == ["0 0 1"]


@pytest.mark.parametrize(
    ("token_at", "targets"),
    [
        ("end", ["6 0 - 0 - - 9", "2 3 4 5 6 7 0"]),
        ("start", ["6 - 7 - - 8 9", "2 3 4 5 6 7 -"]),
    ],
)
def test_first_tokens_of_documents_can_be_left_out_of_the_loss(
    token_at: TokenAt, targets: list[str]
) -> None:
    batch = batch_from_blocks(BLOCKS, 0, token_at, score_first_token=False)

    assert rows_of(batch.targets) == targets


@pytest.mark.parametrize("token_at", ["end", "start"])
def test_attention_derives_the_same_boundaries(token_at: TokenAt) -> None:
    seeded = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 9, (5, 41), generator=seeded)
    batch = batch_from_blocks(blocks, 0, token_at)

    documents = Documents(batch.document_ids, 40, CPU)

    assert torch.equal(documents.positions, batch.positions)
    assert torch.equal(documents.cu_seqlens, batch.cu_seqlens)
    assert documents.cu_seqlens.dtype == batch.cu_seqlens.dtype


def test_attention_without_documents_takes_the_whole_row() -> None:
    assert Documents(None, 40, CPU).cu_seqlens.tolist() == [0, 40]


def test_a_batch_can_be_cut_into_shorter_sequences() -> None:
    blocks = blocks_of(
        "5 6 0 7 8 9 0 3 2",
        "1 2 3 4 5 6 7 0 4",
    )
    batch = batch_from_blocks(blocks, 0)

    cut = batch.split(4)

    assert rows_of(cut.tokens) == ["5 6 0 7", "8 9 0 3", "1 2 3 4", "5 6 7 0"]
    assert rows_of(cut.targets) == ["6 0 7 8", "9 0 3 2", "2 3 4 5", "6 7 0 4"]
    assert rows_of(cut.document_ids) == ["0 0 0 1", "0 0 0 1", "0 0 0 0", "0 0 0 0"]
    assert rows_of(cut.positions) == ["0 1 2 0", "0 1 2 0", "0 1 2 3", "0 1 2 3"]
    assert cut.cu_seqlens.tolist() == [0, 3, 4, 7, 8, 12, 16]


def test_a_cut_to_the_same_length_changes_nothing() -> None:
    batch = batch_from_blocks(BLOCKS, 0)

    cut = batch.split(7)

    assert cut.longest == batch.longest
    for cut_tensor, tensor in zip(cut[:5], batch[:5], strict=True):
        assert torch.equal(cut_tensor, tensor)


def test_a_batch_can_be_divided_by_rows() -> None:
    batch = batch_from_blocks(BLOCKS, 0)

    first, second = batch.in_rows(1)

    assert rows_of(first.tokens) == ["5 6 0 7 0 0 8"]
    assert first.cu_seqlens.tolist() == [0, 3, 5, 6, 7]
    assert rows_of(second.targets) == ["2 3 4 5 6 7 0"]
    assert second.cu_seqlens.tolist() == [0, 7]
