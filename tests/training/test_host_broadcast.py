"""The groups by which ranks talk between hosts."""

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import distributed

from anlit.training.host_broadcast import broadcast_on_host, new_host_group
from anlit.training.interruption import Interruption
from anlit.training.strategies import FullySharded

OWN_WAIT = timedelta(minutes=45)
GLOO_WAIT = timedelta(minutes=30)


@pytest.fixture(autouse=True)
def connected() -> Iterator[None]:
    """One connected rank, whose first group waits for PyTorch's time."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def wait_of(group: distributed.ProcessGroup) -> timedelta:
    backend: Any = group._get_backend(torch.device("cpu"))
    return backend.options._timeout


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (FullySharded(timeout_minutes=45), OWN_WAIT),
        (DDPStrategy(timeout=OWN_WAIT), OWN_WAIT),
        (DDPStrategy(timeout=None), GLOO_WAIT),
        (SingleDeviceStrategy(), GLOO_WAIT),
    ],
    ids=["fsdp", "ddp", "ddp without", "one device"],
)
def test_ranks_wait_on_the_host_as_long_as_the_strategy_says(
    strategy: Strategy, expected: timedelta
) -> None:
    assert wait_of(new_host_group(strategy)) == expected


def test_the_groups_of_signals_and_of_limits_of_time_wait_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = FullySharded(timeout_minutes=45)
    groups = []
    new_group = distributed.new_group

    def record_group(**settings: Any) -> distributed.ProcessGroup:
        groups.append(new_group(**settings))
        return groups[-1]

    monkeypatch.setattr(distributed, "new_group", record_group)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    trainer: Any = SimpleNamespace(strategy=strategy)
    interruption = Interruption()

    broadcast_on_host(trainer)
    interruption.listen(strategy)
    interruption.restore()

    assert [wait_of(group) for group in groups] == [OWN_WAIT, OWN_WAIT]
