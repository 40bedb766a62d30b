"""Batches for a GPU: made in advance, all of the same shape. The tests pretend to have a GPU."""

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from anlit.data.batch import Batch
from anlit.data.loaders import prefetch
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from tests.data.modules import blocks_of, counted, ready
from tests.data.processes import PATIENCE_S


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts batches that go to page-locked memory, which needs a GPU."""
    count = threading.Semaphore(0)

    def pin(batch: Batch) -> Batch:
        count.release()
        return batch

    monkeypatch.setattr(Batch, "pin_memory", pin)
    return count


def data_on_gpu(path: str, **settings: Any) -> Any:
    data = ready(path, model={"vocab_size": 320}, **settings)
    data.trainer.strategy.root_device = torch.device("cuda")
    return data


def prefetching_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_the_next_two_batches_are_made_during_a_step(
    prepared: str, pinned: threading.Semaphore, workers: int
) -> None:
    data = data_on_gpu(prepared, num_workers=workers)
    batches = iter(data.train_dataloader())

    first_batch = next(batches)

    for _ in range(3):  # the first batch and two that nobody has asked for
        assert pinned.acquire(timeout=PATIENCE_S)
    expected = list(islice(ready(prepared).train_dataloader(), 5))
    assert blocks_of([first_batch, *islice(batches, 4)]) == blocks_of(expected)
    assert data.state_dict()["drawn"] == 5 * 4  # batches made in advance are not drawn
    data.teardown("fit")


def test_a_cpu_makes_no_batch_in_advance(prepared: str) -> None:
    data = ready(prepared)

    next(iter(data.train_dataloader()))

    assert prefetching_threads() == []


def test_closing_the_data_ends_the_thread(prepared: str, pinned: threading.Semaphore) -> None:
    data = data_on_gpu(prepared)
    batches = iter(data.train_dataloader())
    next(batches)
    assert len(prefetching_threads()) == 1

    del batches
    data.teardown("fit")

    assert prefetching_threads() == []


def test_an_error_is_raised_where_its_batch_is_yielded() -> None:
    def make_items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("lost")

    items = prefetch(make_items(), 2)

    assert next(items) == 1
    assert next(items) == 2
    with pytest.raises(OSError, match="lost"):
        next(items)
    assert list(items) == []


def test_validation_on_a_gpu_has_batches_of_one_shape(
    prepared: str, streams: Any, pinned: threading.Semaphore
) -> None:
    """Another shape would need another compilation. 79 blocks fill 19 batches of 4, and 3 rows."""
    batches = list(data_on_gpu(prepared).val_dataloader())

    assert {tuple(batch.tokens.shape) for batch in batches} == {(4, 64)}
    assert counted(batches) == streams["val"][1:].tolist()


def test_what_fills_up_a_batch_for_a_gpu_is_no_row_of_documents(
    prepared: str, pinned: threading.Semaphore
) -> None:
    """Flash attention takes 65,535 documents: 32 filled rows of 2,048 tokens would be as many."""
    *_, last_batch = data_on_gpu(prepared).val_dataloader()

    is_filled = (last_batch.targets == IGNORE_INDEX).all(1)
    assert is_filled.tolist() == [False, False, False, True]
    assert last_batch.document_ids[is_filled].unique().tolist() == [0]
