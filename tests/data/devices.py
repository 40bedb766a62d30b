"""A function in two processes that Lightning takes for the two devices of one distributed run."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any


def free_port() -> int:
    """Of this machine, for the processes to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(rank: int, port: int, results: Any, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    # Lightning learns from the environment that the processes are there already.
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results.put((rank, function(**arguments)))


def on_two_devices(function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """What `function` returns on rank 0 and on rank 1."""
    port, forked = free_port(), multiprocessing.get_context("fork")
    results = forked.Queue()
    processes = [forked.Process(target=_run, args=(rank, port, results, function, arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        returned = dict(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [returned[0], returned[1]]
