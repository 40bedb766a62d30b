"""Batches for a GPU: made before they are asked for, all of one shape. The GPU is pretended."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anlit.data.batch import Batch
from anlit.data.streams import made_ahead
from tests.data.modules import blocks_of, counted, ready

PATIENCE_S = 60
"""For what happens at once on an idle machine."""


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts batches that went to page-locked memory, which a machine without a GPU does not have."""
    count = threading.Semaphore(0)

    def pin(batch: Batch) -> Batch:
        count.release()
        return batch

    monkeypatch.setattr(Batch, "pin_memory", pin)
    return count


def on_gpu(path: str, **settings: Any) -> Any:
    data = ready(path, model={"vocab_size": 320}, **settings)
    data.trainer.strategy.root_device = torch.device("cuda")
    return data


@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_the_next_two_batches_are_made_during_a_step(
    prepared: str, pinned: threading.Semaphore, workers: int
) -> None:
    data = on_gpu(prepared, num_workers=workers)
    batches = iter(data.train_dataloader())

    first = next(batches)

    assert all(pinned.acquire(timeout=PATIENCE_S) for _ in range(3))  # nobody asked for two of them
    on_cpu = iter(ready(prepared).train_dataloader())
    expected = [next(on_cpu) for _ in range(5)]
    assert blocks_of([first, *(next(batches) for _ in range(4))]) == blocks_of(expected)
    assert data.state_dict()["drawn"] == 5 * 4  # what waits is not drawn
    data.teardown("fit")


def test_a_cpu_makes_a_batch_when_it_is_asked_for(prepared: str) -> None:
    data = ready(prepared)
    next(iter(data.train_dataloader()))
    assert makers() == []


def test_closing_the_data_ends_the_thread(prepared: str, pinned: threading.Semaphore) -> None:
    data = on_gpu(prepared)
    batches = iter(data.train_dataloader())
    next(batches)
    assert len(makers()) == 1

    del batches
    data.teardown("fit")

    assert makers() == []


def test_an_error_is_raised_where_its_batch_is_asked_for() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("lost")

    read = made_ahead(items(), 2)

    assert (next(read), next(read)) == (1, 2)
    with pytest.raises(OSError, match="lost"):
        next(read)
    assert list(read) == []


def test_validation_on_a_gpu_has_batches_of_one_shape(
    prepared: str, streams: Any, pinned: threading.Semaphore
) -> None:
    """Another shape would be another compilation; 79 blocks are 19 batches of 4 and a rest."""
    batches = list(on_gpu(prepared).val_dataloader())

    assert {tuple(batch.tokens.shape) for batch in batches} == {(4, 64)}
    assert counted(batches) == streams["val"][1:].tolist()


def makers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("batches")]
