"""Where a run folder has links that lead outside, nothing outside changes or goes."""

from pathlib import Path

import pytest

from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from anlit.checkpoints.location import CHECKPOINTS, SHARDED
from anlit.checkpoints.writing import remove_checkpoint, remove_unnamed
from anlit.cli import main
from tests.integration.conftest import fit_arguments, run, shards

__all__ = ["shards"]
SHORT = ("--trainer.max_steps=2", "--trainer.val_check_interval=2", "--ckpt_path=last")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of somebody's."""
    (tmp_path / "outside" / "last-1").mkdir(parents=True)
    for name in ("last-1/text", "last.ckpt"):
        (tmp_path / "outside" / name).write_text("keep")
    return tmp_path / "outside"


def content(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_partial_file_that_is_a_link_is_replaced(shards: Path, tmp_path: Path, outside: Path) -> None:
    before, checkpoints = content(outside), tmp_path / "run" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    (checkpoints / ".partial-last.ckpt").symlink_to(outside / "last.ckpt")
    assert run(fit_arguments(shards, tmp_path / "run", *SHORT)) == 0
    assert content(outside) == before
    assert not (checkpoints / "last.ckpt").is_symlink()


@pytest.mark.parametrize("name", ["metrics.csv", ".fit.lock", CHECKPOINTS, f"{CHECKPOINTS}/{SHARDED}"])
def test_nothing_of_a_run_is_written_through_a_link(
    shards: Path, tmp_path: Path, outside: Path, name: str, capsys
) -> None:
    before, path = content(outside), tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    target = outside if CHECKPOINTS in name else outside / "last.ckpt"
    path.symlink_to(target)
    assert main(fit_arguments(shards, tmp_path / "run", *SHORT)) == 2
    assert f"{path} is a link to {target}, and a run writes into its own folder" in capsys.readouterr().err
    assert content(outside) == before


def test_what_is_a_link_or_has_a_name_is_no_leftover(tmp_path: Path, outside: Path) -> None:
    """Not even where another name stood for a folder first; nor is a folder that belongs to another run."""
    before, folder = content(outside), tmp_path / "run" / SHARDED
    (folder / "last-2").mkdir(parents=True)
    (folder / "last-0").symlink_to(outside, target_is_directory=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / SHARDED).symlink_to(outside, target_is_directory=True)
    for checkpoints in ("run", "linked"):
        remove_unnamed(tmp_path / checkpoints)
    assert [path.name for path in folder.iterdir()] == ["last-0"]
    assert content(outside) == before
    ours, others = tmp_path / "run" / SHARDED / "last-1", tmp_path / "other" / SHARDED / "last-2"
    best, last = (tmp_path / "run" / name for name in ("best.ckpt", "last.ckpt"))
    for folder, link in ((ours, best), (others, last)):
        folder.mkdir(parents=True)
        link.symlink_to(folder)
    storage = AtomicCheckpointIO()
    storage.save_checkpoint({"step": 1}, last)
    assert read_checkpoint(last) == {"step": 1}
    assert others.is_dir()
    storage.remove_checkpoint(best)
    assert ours.is_dir(), "this process did not write it"
    remove_checkpoint(best)
    assert not ours.exists()
