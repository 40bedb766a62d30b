"""Stops a run for a signal at the end of an optimizer step, which all ranks agree on."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import distributed

from anlit.signals import ENDING_SIGNALS, handle_signals, restore_handlers
from anlit.training.host_broadcast import new_host_group

CTRL_C_LIMIT = 3
"""The number of Ctrl-C that ends a run at once, without a new checkpoint."""
LOG_FAILED = 1000
"""The number for a logger that cannot write, greater than any signal."""
STILL_SAVING = (
    b"\nThe run ends after this step and saves; Ctrl-C once more ends it without saving\n"
)
"""The line that the second Ctrl-C prints."""


class Interruption:
    """Records signals. The third Ctrl-C stops at once; other signals may come any number of times.

    Slurm (SIGUSR1), Kubernetes (SIGTERM) or a user (Ctrl-C) signal ranks at different times. Some
    ranks may receive no signal. So each step starts a small all-reduce on the host. The next step
    reads it. No rank waits for a device.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.log_error: Exception | None = None
        self.has_stopped = False
        self._n_ctrl_c = 0
        self._handlers: dict[int, Any] = {}
        self._group: distributed.ProcessGroup | None = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        """The all-reduce of the last step: its tensor, and the handle to wait for."""

    def listen(self, strategy: Strategy) -> None:
        """Install the handlers, and connect the ranks of `strategy`.

        Lightning's SIGTERM handler would end the run without saving.
        """
        self._handlers = handle_signals(self._on_signal, *ENDING_SIGNALS)
        has_ranks = distributed.is_available() and distributed.is_initialized()
        if has_ranks and distributed.get_world_size() > 1:
            self._group = new_host_group(strategy)

    def restore(self) -> None:
        """Restore the previous handlers, except where Lightning has restored earlier ones."""
        replaced = {}
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                replaced[number] = handler
        restore_handlers(replaced)
        self._handlers = {}
        self._group = None
        self._pending = None

    def note_log_error(self, error: Exception) -> None:
        """Let the run end after this step because a logger cannot write."""
        self.log_error = self.log_error or error
        self.signal = LOG_FAILED

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if number != signal.SIGINT:
            return
        self._n_ctrl_c += 1
        if self._n_ctrl_c >= CTRL_C_LIMIT:
            raise KeyboardInterrupt
        if self._n_ctrl_c == CTRL_C_LIMIT - 1 and not self.has_stopped:
            with suppress(OSError):  # print() may be under way in the interrupted code
                os.write(sys.stderr.fileno(), STILL_SAVING)

    def all_ranks_stop(self) -> bool:
        """Whether to stop. Every rank calls this once after each optimizer step.

        All ranks get the same answer. With several ranks it counts the signals before the previous
        call.
        """
        if self._group is None:
            return bool(self.signal)
        answer = 0
        if self._pending is not None:
            largest_signal, work = self._pending
            work.wait()
            answer = int(largest_signal)
        flag = torch.tensor(self.signal)
        work = distributed.all_reduce(flag, distributed.ReduceOp.MAX, self._group, async_op=True)
        self._pending = flag, work
        self.signal = answer or self.signal
        return bool(answer)
