"""Processes to kill and to wait for, and two that stand for the devices of a distributed run."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Process = multiprocessing.process.BaseProcess
PATIENCE_S = 590.0
"""Seconds that a test waits for a slow machine."""
_PORT_NUMBERS = itertools.count()


def start(work: Callable[[], Any], output: Path | None = None, trains: bool = False) -> Process:
    """Call `work` in a process with a new session; its output and its children's go to `output`.

    Work that trains is a function that other processes can import, or a partial of such a function.
    Other work is forked with everything it refers to, and cannot take gradients, see
    `training_context`.
    """
    context: Any = training_context() if trains else multiprocessing.get_context("fork")
    process = context.Process(target=_lead, args=(work, output, trains))
    process.start()
    return process


def _lead(work: Callable[[], Any], output: Path | None, trains: bool) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
    if not trains:
        torch.Tensor.backward = _refuse_gradients  # type: ignore[method-assign]
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    work()


def _refuse_gradients(*_: Any, **__: Any) -> None:
    raise AssertionError("a forked process takes gradients: start it with trains=True")


def finish(process: Process, seconds: float = PATIENCE_S) -> int | None:
    """Wait for a process; return its exit code.

    A process that does not end is killed with its children; then return None.
    """
    process.join(seconds)
    exit_code = process.exitcode
    if exit_code is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
    return exit_code


def members(session: int | None) -> list[int]:
    """Return the living processes of a session."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            state = fields[0]
            session_of_process = int(fields[3])
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
        if session_of_process == session and state != "Z":
            living.append(int(stat.parent.name))
    return living


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port at which processes of this machine can meet.

    The system gives no program a port below 32768 unless it asks for that one. So no other program
    takes the port meanwhile. Test processes, whose numbers are close, have 20 ports each.
    """
    first = 10_000 + 20 * (os.getpid() % 1000)
    for _ in range(20):
        port = first + next(_PORT_NUMBERS) % 20
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"ports {first} to {first + 19} are all in use")


def training_context() -> multiprocessing.context.ForkServerContext:
    """Return a context for processes that train.

    They are forks of a server that has imported everything and computed nothing. The threads that
    autograd starts for devices do not survive a fork. torch starts them at the first backward pass
    on a GPU. A build with CUDA starts them without a GPU too, at the first backward pass on fake
    tensors (`anlit size`). A child of such a process cannot take gradients.
    """
    modules = ["anlit.commands.fit", "anlit.training.models", "anlit.data.module"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    return context


def on_two_devices(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Return the results of `function`, which other processes can import, on rank 0 and rank 1."""
    context = training_context()
    port = str(free_port())
    results = context.Queue()
    processes = []
    for rank in range(2):
        work = (rank, port, results, function, arguments)
        process = context.Process(target=_on_device, args=work)
        process.start()
        processes.append(process)
    try:
        result_by_rank = dict(results.get(timeout=PATIENCE_S) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [result_by_rank[0], result_by_rank[1]]


def _on_device(rank: int, port: str, results: Any, function: Any, arguments: dict) -> None:
    # Lightning learns from the environment that the processes already exist.
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    results.put((rank, function(**arguments)))
