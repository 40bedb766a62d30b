"""What the start of a run says of a DataModule of the user."""

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader, IterableDataset

from anlit.training.data_messages import data_messages


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        yield from range(8)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dataset", [Numbers(), range(8)], ids=["iterable", "map-style"])
def test_ranks_that_may_read_the_same_items_are_told(dataset: Any, world_size: int) -> None:
    """Lightning gives the ranks shares of a map-style dataset alone."""
    trainer: Any = SimpleNamespace(
        datamodule=L.LightningDataModule(),
        train_dataloader={"text": DataLoader(dataset)},
        world_size=world_size,
        num_training_batches=8,
        enable_validation=True,
        max_steps=2,
    )

    messages = " ".join(data_messages(trainer, is_continued=False))

    is_told = "trains on an IterableDataset on 2 ranks" in messages
    assert is_told == (world_size == 2 and isinstance(dataset, Numbers))
