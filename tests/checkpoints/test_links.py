"""Where a run folder has links that lead outside, nothing outside changes or goes."""

import os
from pathlib import Path

import pytest

from anlit.checkpoints.location import CHECKPOINTS, SHARDED
from anlit.cli import main
from tests.integration.conftest import fit_arguments, run, shards
from tests.integration.ranks import FSDP, start_ranks

__all__ = ["shards"]
SHORT = ("--trainer.max_steps=2", "--trainer.val_check_interval=2", "--ckpt_path=last")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody's, older than any run."""
    folder = tmp_path / "outside"
    for name in ("thesis", "last-1"):
        (folder / name).mkdir(parents=True)
        (folder / name / "text").write_text("keep")
        os.utime(folder / name, (1, 1))
    (folder / "last.ckpt").write_text("keep")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_partial_file_that_is_a_link_is_replaced(shards: Path, tmp_path: Path, outside: Path) -> None:
    before, checkpoints = content(outside), tmp_path / "run" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    (checkpoints / ".partial-last.ckpt").symlink_to(outside / "last.ckpt")
    assert run(fit_arguments(shards, tmp_path / "run", *SHORT)) == 0
    assert content(outside) == before
    assert not (checkpoints / "last.ckpt").is_symlink()


@pytest.mark.parametrize("link", [CHECKPOINTS, f"{CHECKPOINTS}/{SHARDED}"])
@pytest.mark.parametrize("strategy", [[], FSDP], ids=["one", "fsdp"])
def test_folders_that_are_links_are_refused(
    shards: Path, tmp_path: Path, outside: Path, link: str, strategy: list[str]
) -> None:
    before, path = content(outside), tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(outside, target_is_directory=True)
    (process,) = start_ranks(fit_arguments(shards, tmp_path / "run", *SHORT, *strategy), 1, log=tmp_path / "log")
    process.join(120)
    assert process.exitcode == 2
    assert f"{path} is a link to {outside}" in (tmp_path / "log.0").read_text()
    assert content(outside) == before


@pytest.mark.parametrize(
    "name",
    ["metrics.csv", "run.json", "config.yaml", ".fit.lock", "tokenizer.json", "hparams.yaml", "events.out.tfevents"],
)
def test_no_file_of_a_run_is_written_through_a_link(
    shards: Path, tmp_path: Path, outside: Path, name: str, capsys
) -> None:
    before, path = content(outside), tmp_path / "run" / name
    path.parent.mkdir()
    path.symlink_to(outside / "last.ckpt")
    assert main(fit_arguments(shards, tmp_path / "run", *SHORT)) == 2
    assert f"{path} is a link to {outside}/last.ckpt, and a run writes into its own folder" in capsys.readouterr().err
    assert content(outside) == before


def test_a_leftover_that_is_a_link_is_left(shards: Path, tmp_path: Path, outside: Path) -> None:
    before, folder = content(outside), tmp_path / "run" / CHECKPOINTS / SHARDED
    folder.mkdir(parents=True)
    (folder / "last-0").symlink_to(outside, target_is_directory=True)
    (process,) = start_ranks(fit_arguments(shards, tmp_path / "run", *SHORT, *FSDP), 1)
    process.join(120)
    assert process.exitcode == 0
    assert content(outside) == before
