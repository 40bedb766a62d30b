"""`anlit` in processes that have everything imported when they start; and what a run's metrics.csv says."""

import csv
import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from anlit.cli import main
from tests.data.processes import free_port, training_context

DDP = ["--trainer.strategy=ddp"]
FSDP = ["--trainer.strategy=anlit.FullySharded", "--trainer.strategy.process_group_backend=gloo"]
BACKGROUND = [*FSDP, "--trainer.strategy.async_checkpoints=true"]


class Shared:
    """A file number of this process; a rank receives that of the same file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (DupFd(self.number),)


def _received(copy: Any) -> int:
    return copy.detach()


def start_ranks(
    arguments: list[str], n_ranks: int, log: Path | None = None
) -> list[ForkServerProcess]:
    """One process per rank, as torchrun starts them; their standard error goes to log.0, log.1 … if it is given."""
    context, port = training_context(), str(free_port())
    if n_ranks > 1:
        arguments = [*arguments, f"--trainer.devices={n_ranks}"]
    processes = []
    for rank in range(n_ranks):
        environment = {
            **os.environ,
            **(_rank_variables(rank, n_ranks, port) if n_ranks > 1 else {}),
        }
        output = None if log is None else f"{log}.{rank}"
        place = (os.getcwd(), environment, Shared(1), Shared(2), output)
        processes.append(context.Process(target=_rank, args=(arguments, *place)))
    for process in processes:
        process.start()
    return processes


def run_ranks(arguments: list[str], n_ranks: int) -> list[int | None]:
    """Their exit codes; one rank is a plain run."""
    processes = start_ranks(arguments, n_ranks)
    for process in processes:
        process.join(1200)
    return [process.exitcode for process in processes]


def ends_of_ranks(
    arguments: list[str], n_ranks: int, log: Path
) -> tuple[list[int | None], list[str]]:
    """Their exit codes and what they write to standard error; a rank that waits for the others for ever is killed."""
    processes = start_ranks(arguments, n_ranks, log)
    for process in processes:
        process.join(590)  # a collective's time-out is ten minutes or more
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes, [Path(f"{log}.{rank}").read_text() for rank in range(n_ranks)]


def _rank_variables(rank: int, n_ranks: int, port: str) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip


def _rank(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    stdout: int,
    stderr: int,
    log: str | None,
) -> None:
    """Run `anlit` as a child of the test's process would: its folder, its environment, its output."""
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
    raise SystemExit(main(arguments))


def logged(run_dir: Path, name: str) -> list[tuple[int, str]]:
    """The steps and values of one metric in metrics.csv, in the order of the file; none before the first row."""
    if not (run_dir / "metrics.csv").exists():
        return []
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [(int(row["step"]), row[name]) for row in csv.DictReader(file) if row.get(name)]


def column(run_dir: Path, name: str) -> list[float]:
    """The logged values of one metric, in order."""
    return [float(value) for _, value in logged(run_dir, name)]
