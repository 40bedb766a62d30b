"""Heeds signals at the end of an optimizer step, the same step on all ranks."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import distributed

from anlit.signals import ENDING_SIGNALS, handle_signals, restore_handlers

IMPATIENT = 3
"""This many times Ctrl-C ends a run at once, without a new checkpoint."""
LOG_FAILED = 1000
"""Stands for a signal, and is greater than any, where a logger cannot write."""
STILL_SAVING = (
    b"\nThe run ends after this step and saves; Ctrl-C once more ends it without saving\n"
)


class Interruption:
    """Records signals. The third Ctrl-C stops at once; other signals may come as often as they like.

    Ranks receive a signal of Slurm (SIGUSR1), Kubernetes (SIGTERM) or a user (Ctrl-C) at different times, or one alone
    does. So each step starts a small all-reduce on the host, which the next step reads: none waits for a device.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.log_error: OSError | None = None
        self._n_ctrl_c = 0
        self._handlers: dict[int, Any] = {}
        self._group: distributed.ProcessGroup | None = None
        self._asked: tuple[torch.Tensor, Any] | None = None

    def listen(self) -> None:
        """Install the handlers. Lightning's SIGTERM handler would end the run without a checkpoint."""
        self._handlers = handle_signals(self._on_signal, *ENDING_SIGNALS)
        if (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            self._group = distributed.new_group(backend="gloo")

    def restore(self) -> None:
        """Restore the previous handlers."""
        restore_handlers(self._handlers)
        self._handlers, self._group, self._asked = {}, None, None

    def note_log_error(self, error: OSError) -> None:
        """End the run at the end of a step because a logger cannot write."""
        self.log_error = self.log_error or error
        self.signal = LOG_FAILED

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        if number != signal.SIGINT:
            return
        self._n_ctrl_c += 1
        if self._n_ctrl_c == IMPATIENT:
            raise KeyboardInterrupt
        if self._n_ctrl_c == IMPATIENT - 1:
            with suppress(OSError):  # print() may be under way in the interrupted code
                os.write(sys.stderr.fileno(), STILL_SAVING)

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
