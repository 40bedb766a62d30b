"""Where one rank alone refuses, all ranks end, with one message."""

from pathlib import Path

import pytest

from tests.integration.conftest import fit_arguments
from tests.integration.ranks import DDP, FSDP, start_ranks

slow = pytest.mark.slow
WAIT = 120
"""Seconds; a collective's time-out is ten minutes or more."""


@pytest.mark.parametrize("strategy", [FSDP, pytest.param(DDP, marks=slow)], ids=["fsdp", "ddp"])
@pytest.mark.parametrize("made", ["true", "false"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end(shards: Path, tmp_path: Path, rank: int, made: str, strategy: list[str]) -> None:
    callback = ["--trainer.callbacks+=tests.integration.callbacks.Refuses", f"--trainer.callbacks.made={made}"]
    arguments = fit_arguments(shards, tmp_path / "run", *strategy, *callback, f"--trainer.callbacks.rank={rank}")
    ranks = start_ranks(arguments, 2, log=tmp_path / "log")
    for process in ranks:
        process.join(WAIT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [2, 2]
    said = [line for number in range(2) for line in (tmp_path / f"log.{number}").read_text().splitlines()]
    assert [line for line in said if "error" in line.lower()] == ["anlit: error: this rank alone refuses"]
