"""Messages between hosts, such as rank 0's decisions, for which no rank waits for its device."""

from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy
from torch import distributed

from anlit.training.lightning_internals import longest_wait


def new_host_group(strategy: Strategy) -> distributed.ProcessGroup:
    """Connect all ranks by gloo. They wait for each other as long as the strategy's setting says.

    gloo's own limit of 30 minutes would end a run during a long save of rank 0 that the user has
    allowed, and would wait longer for a dead rank than the user has allowed.
    """
    return distributed.new_group(timeout=longest_wait(strategy), backend="gloo")


def broadcast_on_host(trainer: L.Trainer) -> None:
    """Let `trainer.strategy.broadcast` send objects between hosts. Every rank calls this.

    Lightning's callbacks ask rank 0 by it whether a time is over (`max_time`, `val_check_interval`,
    `train_time_interval`). NCCL sends an object through the devices: each rank would wait until its
    device has computed all that is queued.
    """
    if distributed.is_available() and distributed.is_initialized():
        group = new_host_group(trainer.strategy)
        send = partial(_broadcast, group)
        trainer.strategy.broadcast = send  # type: ignore[method-assign]


def _broadcast(group: distributed.ProcessGroup, obj: Any, src: int = 0) -> Any:
    """The object of rank `src`, as `Strategy.broadcast` returns it."""
    objects = [obj]
    distributed.broadcast_object_list(objects, src, group=group)
    return objects[0]
