"""Rank 0's decisions in training, sent between hosts so that no rank waits for its device."""

from functools import partial
from typing import Any

import lightning as L
from torch import distributed


def broadcast_on_host(trainer: L.Trainer) -> None:
    """Let `trainer.strategy.broadcast` send objects between hosts. Every rank calls this.

    Lightning's callbacks ask rank 0 by it whether a time is over (`max_time`, `val_check_interval`,
    `train_time_interval`). NCCL sends an object through the devices: each rank would wait until its
    device has computed all that is queued.
    """
    if distributed.is_available() and distributed.is_initialized():
        group = distributed.new_group(backend="gloo")
        send = partial(_broadcast, group)
        trainer.strategy.broadcast = send  # type: ignore[method-assign]


def _broadcast(group: distributed.ProcessGroup, obj: Any, src: int = 0) -> Any:
    """The object of rank `src`, as `Strategy.broadcast` returns it."""
    objects = [obj]
    distributed.broadcast_object_list(objects, src, group=group)
    return objects[0]
