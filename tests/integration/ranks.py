"""`anlit` in processes forked from the test's, which has everything imported; and what a run's metrics.csv says."""

import csv
import multiprocessing
import os
import sys
from pathlib import Path

from anlit.cli import main
from tests.data.processes import free_port

DDP = ["--trainer.strategy=ddp"]
FSDP = ["--trainer.strategy=anlit.FullySharded", "--trainer.strategy.process_group_backend=gloo"]
BACKGROUND = [*FSDP, "--trainer.strategy.async_checkpoints=true"]


def start_ranks(
    arguments: list[str], n_ranks: int, log: Path | None = None
) -> list[multiprocessing.Process]:
    """One process per rank, as torchrun starts them; their standard error goes to log.0, log.1 … if it is given."""
    context, port = multiprocessing.get_context("fork"), free_port()
    given = [*arguments, f"--trainer.devices={n_ranks}"] if n_ranks > 1 else arguments
    processes = [
        context.Process(target=_rank, args=(given, rank, n_ranks, port, log))
        for rank in range(n_ranks)
    ]
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
        process.join(120)  # a collective's time-out is ten minutes or more
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes, [Path(f"{log}.{rank}").read_text() for rank in range(n_ranks)]


def _rank(arguments: list[str], rank: int, n_ranks: int, port: int, log: Path | None) -> None:
    if n_ranks > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
    if log is not None:
        os.dup2(os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)  # pytest's own went elsewhere
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
