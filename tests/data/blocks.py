"""Batches from single blocks of tokens, for tests that need no prepared folder."""

from collections.abc import Sequence

import numpy as np

from anlit.data.batch import Batch, TokenAt, batch_from_blocks


class BlockCollate:
    """Collate function for loaders of single blocks: a list of (T + 1,) arrays becomes a `Batch`."""

    def __init__(self, end_of_document: int, token_at: TokenAt = "end", score_first_token: bool = True) -> None:
        self.end_of_document = end_of_document
        self.token_at = token_at
        self.score_first_token = score_first_token

    def __call__(self, blocks: Sequence) -> Batch:
        stacked = np.stack([np.asarray(block) for block in blocks])
        return batch_from_blocks(stacked, self.end_of_document, self.token_at, self.score_first_token)
