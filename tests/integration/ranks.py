"""Runs `anlit` in processes that start with everything imported."""

import atexit
import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from anlit.cli import main
from tests.data.processes import PATIENCE_S, free_port, training_context

DDP = ["--trainer.strategy=ddp"]
FSDP = ["--trainer.strategy=anlit.FullySharded", "--trainer.strategy.process_group_backend=gloo"]
BACKGROUND = [*FSDP, "--trainer.strategy.async_checkpoints=true"]


class Shared:
    """A file number of this process. A rank receives its number for the same file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (DupFd(self.number),)


def _received(copy: Any) -> int:
    return copy.detach()


def start_ranks(
    arguments: list[str], n_ranks: int, log: Path | None = None
) -> list[ForkServerProcess]:
    """Start a process per rank, as torchrun does.

    The standard error of the ranks goes to log.0, log.1 … if there is a `log`.
    """
    context = training_context()
    port = str(free_port())
    if n_ranks > 1:
        arguments = [*arguments, f"--trainer.devices={n_ranks}"]
    processes = []
    for rank in range(n_ranks):
        environment = dict(os.environ)
        if n_ranks > 1:
            environment |= _rank_variables(rank, n_ranks, port)
        rank_log = None if log is None else f"{log}.{rank}"
        process_arguments = (arguments, os.getcwd(), environment, Shared(1), Shared(2), rank_log)
        processes.append(context.Process(target=_run_rank, args=process_arguments))
    for process in processes:
        process.start()
    return processes


def run_ranks(arguments: list[str], n_ranks: int) -> list[int | None]:
    """Run `anlit` on ranks, and return their exit codes. One rank is a plain run."""
    return wait_for_ranks(start_ranks(arguments, n_ranks))


def run_ranks_with_logs(
    arguments: list[str], n_ranks: int, log: Path
) -> tuple[list[int | None], list[str]]:
    """Run `anlit` on ranks, and return their exit codes and standard errors."""
    codes = wait_for_ranks(start_ranks(arguments, n_ranks, log))
    logs = []
    for rank in range(n_ranks):
        logs.append(Path(f"{log}.{rank}").read_text())
    return codes, logs


class ForkedCommand:
    """Stands in for `subprocess.Popen` of `python -m anlit`: a process that need not import."""

    def __init__(self, command: list[str], **_: Any) -> None:
        arguments = command[command.index("anlit") + 1 :]
        (self._process,) = start_ranks(arguments, 1)

    def __enter__(self) -> "ForkedCommand":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join()

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode


def wait_for_ranks(processes: list[ForkServerProcess]) -> list[int | None]:
    """Return the exit codes of processes. One that hangs is killed, and has None."""
    for process in processes:
        process.join(PATIENCE_S)  # a collective's time-out is ten minutes or more
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _rank_variables(rank: int, n_ranks: int, port: str) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }


def _run_rank(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    stdout: int,
    stderr: int,
    log: str | None,
) -> None:
    """Run `anlit` in the folder, environment and output of the test's process."""
    multiprocessing.set_start_method(None, force=True)  # the default, as in a command
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        stderr = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    exit_code = main(arguments)
    atexit._run_exitfuncs()  # a forked process leaves them out, a command does not
    raise SystemExit(exit_code)
