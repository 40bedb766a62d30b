"""Handles SIGINT, SIGTERM and SIGUSR1 at the end of an optimizer step, the same step on all ranks."""

import signal
from types import FrameType
from typing import Any

import torch
from torch import distributed


class Interruption:
    """Records signals. A second Ctrl-C stops at once; other signals may come more than once.

    Ranks receive a signal of Slurm (SIGUSR1), Kubernetes (SIGTERM) or a user (Ctrl-C) at different times, or one alone
    does. So each step starts a small all-reduce on the host, which the next step reads: none waits for a device.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._handlers: dict[int, Any] = {}
        self._group: distributed.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, Any] | None = None

    def listen(self) -> None:
        """Install the handlers. Lightning's SIGTERM handler would end the run without a checkpoint."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._handlers[number] = signal.signal(number, self._on_signal)
        if (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            self._group = distributed.new_group(backend="gloo")

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers, self._group, self._asked = {}, None, None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number

    def all_ranks_stop(self) -> bool:
        """Whether to stop now. Every rank calls this once after each optimizer step and gets the same answer.

        With several ranks the answer is for the signals that had come at the previous call.
        """
        if self._group is None:
            return bool(self.signal)
        answer = 0
        if self._asked is not None:
            self._asked[1].wait()
            answer = int(self._asked[0])
        flag = torch.tensor(self.signal)
        self._asked = (
            flag,
            distributed.all_reduce(flag, distributed.ReduceOp.MAX, self._group, async_op=True),
        )
        self.signal = answer or self.signal
        return bool(answer)
