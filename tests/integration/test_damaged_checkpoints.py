"""No run continues from a damaged checkpoint: a sentence names the other checkpoints."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anlit.checkpoints.checkpoint_io import read_checkpoint, refuse_damaged
from anlit.checkpoints.integrity import DamagedError
from anlit.errors import UserError
from tests.data.reader import flip
from tests.integration.conftest import Train, fit_arguments
from tests.integration.ranks import FSDP, run_ranks_with_logs
from tests.integration.test_strategies import PART_FILES

STEPS = 6
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sharded(trained: Train) -> Path:
    settings = (f"--trainer.max_steps={STEPS}", "--trainer.val_check_interval=3")
    return trained(*settings, *FSDP, n_ranks=2)


def resaved(**changes: object) -> Damage:
    """A damage that replaces entries of the checkpoint; the file itself is whole."""

    def damage(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        torch.save(content | changes, path)

    return damage


def cut_short(path: Path) -> None:
    n_bytes = path.stat().st_size
    os.truncate(path, n_bytes // 2)


FILE: dict[str, Damage] = {
    "a flipped bit": flip,
    "cut short": cut_short,
    "a list": lambda path: torch.save([1, 2], path),
    "no weights": resaved(state_dict=None),
    "empty loops": resaved(loops={}),
    "an empty record": resaved(anlit={}),
    "an optimizer of a wrong type": resaved(optimizer_states=[{"state": {}}]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to(path.with_name("gone"))),
}
PARTS: dict[str, Damage] = {
    "a flipped bit in a part": lambda path: flip(path / PART_FILES[1]),
    "a part missing": lambda path: (path / PART_FILES[0]).unlink(),
    "no rest": lambda path: (path / "meta.pt").unlink(),
    "no sums": lambda path: (path / "sums.json").unlink(),
}


def assert_last_is_refused(run_dir: Path) -> None:
    """The last checkpoint is refused, and the best, which is whole, is named in its place."""
    message = r"checkpoints/last\.ckpt is damaged \(.*\): continue with .*/best\.ckpt$"
    with pytest.raises(UserError, match=message):
        refuse_damaged(run_dir / "checkpoints" / "last.ckpt")
    refuse_damaged(run_dir / "checkpoints" / "best.ckpt")


@pytest.mark.parametrize("damage", FILE.values(), ids=FILE.keys())
def test_no_damage_of_a_file_is_overlooked(finished: Path, tmp_path: Path, damage: Damage) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run", symlinks=True)

    damage(run_dir / "checkpoints" / "last.ckpt")

    assert_last_is_refused(run_dir)


def test_the_latest_step_is_named_whatever_the_times_of_the_files(
    trained: Train, tmp_path: Path
) -> None:
    """A copy may have other times. A checkpoint of weights alone continues nothing."""
    keep = "--trainer.callbacks+=anlit.training.callbacks.StepCheckpoints"
    weights = (keep, "--trainer.callbacks.steps=7", "--trainer.callbacks.save_weights_only=true")
    whole = trained("--trainer.max_steps=7", keep, "--trainer.callbacks.steps=2", *weights)
    checkpoints = shutil.copytree(whole, tmp_path / "run") / "checkpoints"
    (checkpoints / "best.ckpt").unlink()
    files = [checkpoints / f"step-0000000{step}.ckpt" for step in (6, 4, 2)]
    for seconds, file in enumerate(files):
        os.utime(file, (seconds, seconds))
    cut_short(checkpoints / "last.ckpt")

    with pytest.raises(UserError, match=rf"is damaged \(.*\): continue with .* {files[0]}$"):
        refuse_damaged(checkpoints / "last.ckpt")


@pytest.mark.parametrize("damage", PARTS.values(), ids=PARTS.keys())
def test_no_damage_of_a_part_is_overlooked(sharded: Path, tmp_path: Path, damage: Damage) -> None:
    run_dir = shutil.copytree(sharded, tmp_path / "run", symlinks=True)
    last = run_dir / "checkpoints" / "last.ckpt"

    damage(last.resolve())

    assert_last_is_refused(run_dir)


def test_a_copy_of_a_damaged_file_is_not_read(finished: Path, tmp_path: Path) -> None:
    copied = shutil.copy(finished / "checkpoints" / "last.ckpt", tmp_path / "copy.ckpt")
    flip(copied)

    with pytest.raises(DamagedError):
        read_checkpoint(copied)


def test_a_copy_of_a_damaged_part_is_not_read(sharded: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(sharded / "checkpoints" / "last.ckpt", tmp_path / "copy.ckpt")
    flip(copied / PART_FILES[1])

    with pytest.raises(DamagedError):
        read_checkpoint(copied)


@pytest.mark.parametrize(
    ("damaged", "fix"),
    [
        (["last"], "continue with --ckpt_path {run_dir}/checkpoints/best.ckpt"),
        (["last", "best"], "the run has no other checkpoint"),
    ],
    ids=["last", "both"],
)
def test_fit_refuses_in_one_sentence_and_changes_nothing(
    shards: Path, tmp_path: Path, finished: Path, damaged: list[str], fix: str, refusal
) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for name in damaged:
        flip(run_dir / "checkpoints" / f"{name}.ckpt")
    record = (run_dir / "run.json").read_bytes()

    error = refusal(*fit_arguments(shards, run_dir, "--ckpt_path=last"))

    assert fix.format(run_dir=run_dir) in error
    assert (run_dir / "run.json").read_bytes() == record


@pytest.mark.parametrize(
    "file_name", [PART_FILES[1], pytest.param("meta.pt", marks=pytest.mark.slow)]
)
def test_all_ranks_refuse_to_validate_a_damaged_folder(
    tmp_path: Path, sharded: Path, file_name: str
) -> None:
    run_dir = shutil.copytree(sharded, tmp_path / "run", symlinks=True)
    last = run_dir / "checkpoints" / "last.ckpt"
    flip(last.resolve() / file_name)
    arguments = ["validate", f"--config={run_dir}/config.yaml", f"--ckpt_path={last}"]

    codes, logs = run_ranks_with_logs(arguments, 2, tmp_path / "log")

    assert codes == [2, 2]
    error_output = "".join(logs)
    assert "Traceback" not in error_output
    assert error_output.count("last.ckpt is damaged (") == 1, "one of them says why"
    assert f"continue with --ckpt_path {run_dir}/checkpoints/best.ckpt" in error_output
