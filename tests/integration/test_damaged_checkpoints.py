"""No run continues from a damaged checkpoint: a sentence names the other checkpoints."""

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
    return trained(
        f"--trainer.max_steps={STEPS}", "--trainer.val_check_interval=3", *FSDP, n_ranks=2
    )


def resaved(**changes: object) -> Damage:
    """A damage that replaces entries of the checkpoint; the file itself is whole."""
    return lambda path: torch.save(torch.load(path, weights_only=True) | changes, path)


FILE: dict[str, Damage] = {
    "a flipped bit": flip,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
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


@pytest.mark.parametrize("name", [*FILE, *PARTS])
def test_no_damage_is_overlooked(tmp_path: Path, finished: Path, sharded: Path, name: str) -> None:
    run_dir = shutil.copytree(
        finished if name in FILE else sharded, tmp_path / "run", symlinks=True
    )
    last = run_dir / "checkpoints" / "last.ckpt"
    FILE[name](last) if name in FILE else PARTS[name](last.resolve())
    refuse_damaged(run_dir / "checkpoints" / "best.ckpt")  # it is whole
    with pytest.raises(
        UserError, match=r"checkpoints/last\.ckpt is damaged \(.*\): continue with .*/best\.ckpt$"
    ):
        refuse_damaged(last)
    if name in (
        "a flipped bit",
        "a flipped bit in a part",
    ):  # whoever reads looks at the sums, of a copy too
        with pytest.raises(DamagedError):
            read_checkpoint(last.resolve().rename(tmp_path / "copy.ckpt"))


@pytest.mark.parametrize("best", ["whole", "damaged"])
def test_fit_refuses_in_one_sentence_and_changes_nothing(
    shards: Path, tmp_path: Path, finished: Path, best, refusal
):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for name in ("last", "best") if best == "damaged" else ("last",):
        flip(run_dir / "checkpoints" / f"{name}.ckpt")
    record = (run_dir / "run.json").read_bytes()
    error = refusal(*fit_arguments(shards, run_dir, "--ckpt_path=last"))
    instead = f"continue with --ckpt_path {run_dir}/checkpoints/best.ckpt"
    assert (instead if best == "whole" else "the run has no other checkpoint") in error
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
    for code, error_output in zip(codes, logs, strict=True):
        assert (code, "Traceback" in error_output) == (2, False), error_output
        assert "last.ckpt is damaged (" in error_output
        assert f"continue with --ckpt_path {run_dir}/checkpoints/best.ckpt" in error_output
