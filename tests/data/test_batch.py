"""Documents and targets of packed blocks, worked out by hand. 0 is the end-of-document token."""

import torch

from anlit.data.batch import batch_from_blocks
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import IGNORE_INDEX

BLOCK = torch.tensor([[5, 6, 0, 7, 0, 0, 8, 9], [1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.int32)


def test_targets_are_the_next_tokens_and_a_document_owns_the_token_that_ends_it() -> None:
    batch = batch_from_blocks(BLOCK, end_of_document=0)
    assert batch.tokens.tolist() == [[5, 6, 0, 7, 0, 0, 8], [1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [[6, 0, 7, 0, 0, 8, 9], [2, 3, 4, 5, 6, 7, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0] * 7]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 14]
    assert batch.longest == 7
    assert [tensor.dtype for tensor in batch[:5]] == [*[torch.int64] * 4, torch.int32]
    assert all(tensor.is_contiguous() for tensor in batch[:5])


def test_a_document_owns_the_token_that_starts_it() -> None:
    batch = batch_from_blocks(BLOCK, end_of_document=0, token_at="start")
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 2, 3, 3], [0] * 7]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 14]
    at_start = batch_from_blocks(torch.tensor([[0, 5, 0, 6]]), end_of_document=0, token_at="start")
    assert at_start.document_ids.tolist() == [[0, 0, 1]]


def test_first_tokens_of_other_documents_can_be_left_out_of_the_loss() -> None:
    at_end = batch_from_blocks(BLOCK, end_of_document=0, score_first_token=False)
    assert at_end.targets.tolist() == [
        [6, 0, IGNORE_INDEX, 0, IGNORE_INDEX, IGNORE_INDEX, 9],
        [2, 3, 4, 5, 6, 7, 0],
    ]
    at_start = batch_from_blocks(
        BLOCK, end_of_document=0, token_at="start", score_first_token=False
    )
    assert at_start.targets.tolist() == [
        [6, IGNORE_INDEX, 7, IGNORE_INDEX, IGNORE_INDEX, 8, 9],
        [2, 3, 4, 5, 6, 7, IGNORE_INDEX],
    ]


def test_the_attention_derives_the_same_boundaries() -> None:
    blocks = torch.randint(0, 9, (5, 41), generator=torch.Generator().manual_seed(0))
    for token_at in ("end", "start"):
        batch = batch_from_blocks(blocks, 0, token_at)
        documents = Documents(batch.document_ids, 40, torch.device("cpu"))
        assert torch.equal(documents.positions, batch.positions)
        assert torch.equal(documents.cu_seqlens, batch.cu_seqlens)
        assert documents.cu_seqlens.dtype == batch.cu_seqlens.dtype
    assert Documents(None, 40, torch.device("cpu")).cu_seqlens.tolist() == [0, 40]


def test_cut_into_shorter_sequences() -> None:
    batch = batch_from_blocks(
        torch.tensor([[5, 6, 0, 7, 8, 9, 0, 3, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4]]), 0
    )
    cut = batch.split(4)
    assert cut.tokens.tolist() == [[5, 6, 0, 7], [8, 9, 0, 3], [1, 2, 3, 4], [5, 6, 7, 0]]
    assert cut.targets.tolist() == [[6, 0, 7, 8], [9, 0, 3, 2], [2, 3, 4, 5], [6, 7, 0, 4]]
    assert cut.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [0] * 4, [0] * 4]
    assert cut.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert cut.cu_seqlens.tolist() == [0, 3, 4, 7, 8, 12, 16]
    assert all(
        torch.equal(one, two) for one, two in zip(batch.split(8)[:5], batch[:5], strict=True)
    )
