"""Processes to kill and to wait for, and two that Lightning takes for the devices of one distributed run."""

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


def start(work: Callable[[], Any], output: Path | None = None, trains: bool = False) -> Process:
    """Call `work` in a process with a session of its own; what it and its children print goes to `output`.

    Work that trains is a function that other processes can import, or a partial of one. Other work is forked with all
    that it refers to, and cannot take gradients (`training_context`).
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
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    work()


def _refuse_gradients(*_: Any, **__: Any) -> None:
    raise AssertionError("a forked process takes gradients: start it with trains=True")


def finish(process: Process, seconds: float = 60) -> int | None:
    """Wait for a process; its exit code, None if it would not end and had to be ended with all that it started."""
    process.join(seconds)
    if (code := process.exitcode) is None:
        os.killpg(process.pid or 0, signal.SIGKILL)
    return code


def members(session: int | None) -> list[int]:
    """The living processes of a session."""
    living = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):  # it has just ended
            continue
        if int(its_session) == session and state != "Z":
            living.append(int(stat.parent.name))
    return living


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def free_port() -> int:
    """For processes of this machine to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def training_context() -> multiprocessing.context.ForkServerContext:
    """Start processes that train: forks of a server that has imported everything and computed nothing.

    The threads that autograd starts for devices do not survive a fork. torch starts them at the first backward pass
    on a GPU, and a build with CUDA does so without one too, at the first on fake tensors (`anlit size`). A child of
    such a process cannot take gradients.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["anlit.commands.fit", "anlit.training.models", "anlit.data.module"]
    )
    return context


def on_two_devices(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """What `function`, which other processes can import, returns on rank 0 and on rank 1."""
    context, port = training_context(), str(free_port())
    results = context.Queue()
    processes = [
        context.Process(target=_on_device, args=(rank, port, results, function, arguments))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        returned = dict(results.get(timeout=600) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [returned[0], returned[1]]


def _on_device(rank: int, port: str, results: Any, function: Any, arguments: dict) -> None:
    # Lightning learns from the environment that the processes are there already.
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    results.put((rank, function(**arguments)))
