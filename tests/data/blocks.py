"""Batches from single blocks of tokens, for tests that need no prepared folder."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anlit.data.batch import Batch, batch_from_blocks


def collate(blocks: Sequence, **settings: Any) -> Batch:
    """Collate function for loaders of single blocks: a list of (T + 1,) arrays becomes a `Batch`; 0 ends a document."""
    return batch_from_blocks(np.stack([np.asarray(block) for block in blocks]), end_of_document=0, **settings)
