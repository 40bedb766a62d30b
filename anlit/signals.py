"""Signals that end a command in order, and child processes that leave them to their parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anlit.errors import Preempted

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a scheduler or a cloud, a closed terminal, Slurm's warning."""
SIGNALS_FOR_PARENT = (*ENDING_SIGNALS, signal.SIGUSR2)
"""Signals that child processes ignore."""


def handle_signals(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> dict[int, Any]:
    """Install `handler` for signals; return the previous handlers, for `restore_handlers`.

    SIGHUP stays ignored if `nohup` has started the command.
    """
    previous_handlers: dict[int, Any] = {}
    for number in numbers:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        previous_handlers[number] = signal.signal(number, handler)
    return previous_handlers


def restore_handlers(handlers: dict[int, Any]) -> None:
    """Install the handlers that `handle_signals` has returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def preempted_by_signals() -> Iterator[None]:
    """Raise `Preempted` at each of the `ENDING_SIGNALS` but Ctrl-C.

    Python has an exception for Ctrl-C.
    """
    process_id = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == process_id:
            raise Preempted
        signal.signal(number, signal.SIG_DFL)  # a forked child
        os.kill(os.getpid(), number)

    previous_handlers = handle_signals(handle, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    try:
        yield
    finally:
        # A rank that refuses ignores signals until it has ended.
        for number, previous_handler in previous_handlers.items():
            if signal.getsignal(number) == handle:
                signal.signal(number, previous_handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back while child processes start; they inherit this until they are ready."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_FOR_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def leave_signals_to_parent(*_: Any) -> None:
    """Make this child process ignore signals to its process group, job or container.

    The parent saves and then ends its children. SIGTERM from the parent itself ends this process:
    DataLoader and multiprocessing end a child that hangs in this way.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_FOR_PARENT)  # later threads inherit it
    threading.Thread(target=_end_at_parents_sigterm, daemon=True).start()


def _end_at_parents_sigterm() -> None:
    parent = multiprocessing.parent_process()  # behind a fork server not the system's parent
    parent_id = os.getppid() if parent is None else parent.pid
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent_id:
        pass
    os._exit(0)
