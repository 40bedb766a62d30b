"""Documents and targets of packed blocks, worked out by hand. 0 is the end-of-document token."""

import pickle

import numpy as np
import torch

from anlit.data.batch import IGNORED, BlockCollate, batch_from_blocks

BLOCK = torch.tensor([[5, 6, 0, 7, 0, 0, 8, 9], [1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.int32)


def test_tokens_and_targets_are_the_block_and_its_shift() -> None:
    batch = batch_from_blocks(BLOCK, end_of_document=0)
    assert batch.tokens.tolist() == [[5, 6, 0, 7, 0, 0, 8], [1, 2, 3, 4, 5, 6, 7]]
    assert batch.targets.tolist() == [[6, 0, 7, 0, 0, 8, 9], [2, 3, 4, 5, 6, 7, 0]]
    assert {tensor.dtype for tensor in batch} == {torch.int64}


def test_a_document_owns_the_token_that_ends_it() -> None:
    batch = batch_from_blocks(BLOCK, end_of_document=0)
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0] * 7]


def test_a_document_owns_the_token_that_starts_it() -> None:
    batch = batch_from_blocks(BLOCK, end_of_document=0, token_at="start")
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 2, 3, 3], [0] * 7]
    at_start = batch_from_blocks(torch.tensor([[0, 5, 0, 6]]), end_of_document=0, token_at="start")
    assert at_start.document_ids.tolist() == [[0, 0, 1]]


def test_first_tokens_of_other_documents_can_be_left_out_of_the_loss() -> None:
    at_end = batch_from_blocks(BLOCK, end_of_document=0, score_first_token=False)
    assert at_end.targets.tolist() == [[6, 0, IGNORED, 0, IGNORED, IGNORED, 9], [2, 3, 4, 5, 6, 7, 0]]
    at_start = batch_from_blocks(BLOCK, end_of_document=0, token_at="start", score_first_token=False)
    assert at_start.targets.tolist() == [[6, IGNORED, 7, IGNORED, IGNORED, 8, 9], [2, 3, 4, 5, 6, 7, IGNORED]]


def test_collate_survives_pickling_and_keeps_large_uint16_ids() -> None:
    collate = pickle.loads(pickle.dumps(BlockCollate(0, "end", score_first_token=False)))
    batch = collate([np.array([65535, 0, 3], dtype=np.uint16), np.array([1, 2, 3], dtype=np.uint16)])
    assert batch.tokens.tolist() == [[65535, 0], [1, 2]]
    assert batch.targets.tolist() == [[0, IGNORED], [2, 3]]
