"""Signals that end a command in order, and child processes that leave them to their parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anlit.errors import Preempted

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Ctrl-C, a scheduler or a cloud, a closed terminal, Slurm's warning."""
LEFT_TO_PARENT = (*ENDING, signal.SIGUSR2)


def handle_signals(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> dict[int, Any]:
    """Install `handler` for signals and return the handlers before, for `restore_handlers`.

    SIGHUP stays ignored where `nohup` has started the command.
    """
    before: dict[int, Any] = {}
    for number in numbers:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, handler)
    return before


def restore_handlers(handlers: dict[int, Any]) -> None:
    """Install the handlers that `handle_signals` has returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def preempted_by_signals() -> Iterator[None]:
    """Raise `Preempted` at each signal of `ENDING` but Ctrl-C, which Python has an exception for."""
    process = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == process:
            raise Preempted
        signal.signal(number, signal.SIG_DFL)  # a forked child
        os.kill(os.getpid(), number)

    before = handle_signals(handle, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    try:
        yield
    finally:
        restore_handlers(before)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back while child processes start, which inherit this until they are ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent(*_: Any) -> None:
    """Make this child process deaf to signals that reach a whole process group, job or container.

    The parent saves and then ends its children. SIGTERM from the parent itself ends this process:
    DataLoader and multiprocessing end a child that hangs in this way.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)  # threads started later inherit it
    threading.Thread(target=_end_when_parent_says, daemon=True).start()


def _end_when_parent_says() -> None:
    parent = multiprocessing.parent_process()  # behind a fork server it is not the system's parent
    parent_pid = os.getppid() if parent is None else parent.pid
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent_pid:
        pass
    os._exit(0)
