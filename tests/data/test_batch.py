"""Documents and targets of packed blocks, worked out by hand. Token 0 ends a document."""

import pytest
import torch

from anlit.data.batch import TokenAt, batch_from_blocks
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import IGNORE_INDEX

BLOCKS = torch.tensor([[5, 6, 0, 7, 0, 0, 8, 9], [1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.int32)
CPU = torch.device("cpu")


def test_targets_are_the_next_tokens_and_a_document_has_the_token_that_ends_it() -> None:
    batch = batch_from_blocks(BLOCKS, end_of_document=0)

    assert batch.tokens.tolist() == [[5, 6, 0, 7, 0, 0, 8], [1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [[6, 0, 7, 0, 0, 8, 9], [2, 3, 4, 5, 6, 7, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0] * 7]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 14]
    assert batch.longest == 7
    assert [tensor.dtype for tensor in batch[:4]] == [torch.int64] * 4
    assert batch.cu_seqlens.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in batch[:5])


def test_a_document_has_the_token_that_starts_it() -> None:
    batch = batch_from_blocks(BLOCKS, end_of_document=0, token_at="start")

    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 2, 3, 3], [0] * 7]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 14]


def test_a_row_that_begins_with_a_document_begins_with_number_0() -> None:
    blocks = torch.tensor([[0, 5, 0, 6]])

    batch = batch_from_blocks(blocks, end_of_document=0, token_at="start")

    assert batch.document_ids.tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("token_at", "targets"),
    [
        ("end", [[6, 0, IGNORE_INDEX, 0, IGNORE_INDEX, IGNORE_INDEX, 9], [2, 3, 4, 5, 6, 7, 0]]),
        (
            "start",
            [
                [6, IGNORE_INDEX, 7, IGNORE_INDEX, IGNORE_INDEX, 8, 9],
                [2, 3, 4, 5, 6, 7, IGNORE_INDEX],
            ],
        ),
    ],
)
def test_first_tokens_of_documents_can_be_left_out_of_the_loss(
    token_at: TokenAt, targets: list[list[int]]
) -> None:
    batch = batch_from_blocks(BLOCKS, 0, token_at, score_first_token=False)

    assert batch.targets.tolist() == targets


@pytest.mark.parametrize("token_at", ["end", "start"])
def test_attention_derives_the_same_boundaries(token_at: TokenAt) -> None:
    blocks = torch.randint(0, 9, (5, 41), generator=torch.Generator().manual_seed(0))
    batch = batch_from_blocks(blocks, 0, token_at)

    documents = Documents(batch.document_ids, 40, CPU)

    assert torch.equal(documents.positions, batch.positions)
    assert torch.equal(documents.cu_seqlens, batch.cu_seqlens)
    assert documents.cu_seqlens.dtype == batch.cu_seqlens.dtype


def test_attention_without_documents_takes_the_whole_row() -> None:
    assert Documents(None, 40, CPU).cu_seqlens.tolist() == [0, 40]


def test_a_batch_can_be_cut_into_shorter_sequences() -> None:
    blocks = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 3, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4]])
    batch = batch_from_blocks(blocks, 0)

    cut = batch.split(4)

    assert cut.tokens.tolist() == [[5, 6, 0, 7], [8, 9, 0, 3], [1, 2, 3, 4], [5, 6, 7, 0]]
    assert cut.targets.tolist() == [[6, 0, 7, 8], [9, 0, 3, 2], [2, 3, 4, 5], [6, 7, 0, 4]]
    assert cut.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0] * 4, [0] * 4]
    assert cut.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
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

    assert first.tokens.tolist() == batch.tokens[:1].tolist()
    assert first.cu_seqlens.tolist() == [0, 3, 5, 6, 7]
    assert second.targets.tolist() == batch.targets[1:].tolist()
    assert second.cu_seqlens.tolist() == [0, 7]
