"""`anlit fit` on several ranks of this machine, forked from the test's process, which has everything imported."""

import multiprocessing
import os
import sys
from pathlib import Path

from anlit.cli import main
from tests.data.devices import free_port
from tests.integration.conftest import logged

DDP = ["--trainer.strategy=ddp"]
FSDP = ["--trainer.strategy=anlit.FullySharded", "--trainer.strategy.process_group_backend=gloo"]


def start_ranks(arguments: list[str], n_ranks: int, log: Path | None = None) -> list[multiprocessing.Process]:
    """One process per rank, as torchrun starts them; their standard error goes to log.0, log.1 … if it is given."""
    port = free_port()
    processes = []
    for rank in range(n_ranks):
        context = multiprocessing.get_context("fork")
        process = context.Process(
            target=_rank, args=([*arguments, f"--trainer.devices={n_ranks}"], rank, n_ranks, port, log)
        )
        process.start()
        processes.append(process)
    return processes


def run_ranks(arguments: list[str], n_ranks: int) -> list[int | None]:
    """Their exit codes; one rank is a plain run."""
    processes = start_ranks(arguments, n_ranks)
    for process in processes:
        process.join(1200)
    return [process.exitcode for process in processes]


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


def column(run_dir: Path, name: str) -> list[float]:
    """The logged values of one metric, in order."""
    return [float(value) for _, value in logged(run_dir, name)]
