"""A run is not continued from a damaged checkpoint, whatever the damage: one sentence names what else there is."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anlit.checkpoints.checkpoint_io import read_checkpoint, refuse_damaged
from anlit.checkpoints.integrity import DamagedError
from anlit.cli import main
from anlit.errors import UserError
from tests.integration.conftest import fit_arguments
from tests.integration.ranks import FSDP, run_ranks, start_ranks
from tests.integration.test_checkpoint_matrix import PART_FILES

STEPS = 6
Damage = Callable[[Path], None]
SHORT = (f"--trainer.max_steps={STEPS}", "--trainer.val_check_interval=3", "--ckpt_path=last")


@pytest.fixture(scope="module")
def sharded(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "sharded"
    assert run_ranks(fit_arguments(shards, run_dir, *SHORT, *FSDP), 2) == [0, 0]
    return run_dir


def flip(path: Path, share: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def resaved(change: Callable[[dict], object]) -> Damage:
    def damage(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        torch.save(change(content), path)

    return damage


def without(key: str) -> Damage:
    return resaved(lambda content: {k: v for k, v in content.items() if k != key})


def linked_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILE: dict[str, Damage] = {
    "a flipped bit": flip,
    "cut short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("no checkpoint"),
    "a list": resaved(lambda content: [1, 2]),
    "somebody else's": resaved(lambda content: {"state_dict": content["state_dict"]}),
    "no weights": without("state_dict"),
    "no optimizer": without("optimizer_states"),
    "no loops": without("loops"),
    "empty loops": resaved(lambda content: {**content, "loops": {}}),
    "an empty record": resaved(lambda content: {**content, "anlit": {}}),
    "no optimizer in the list": resaved(lambda content: {**content, "optimizer_states": []}),
    "an optimizer of a wrong type": resaved(lambda content: {**content, "optimizer_states": [{"state": {}}]}),
    "weights of a wrong type": resaved(lambda content: {**content, "state_dict": 5}),
    "a folder": a_folder,
    "a link to nothing": linked_to_nothing,
}
PARTS: dict[str, Damage] = {
    "a flipped bit in a part": lambda path: flip(path / PART_FILES[1]),
    "a part cut short": lambda path: cut(path / PART_FILES[1]),
    "a part missing": lambda path: (path / PART_FILES[0]).unlink(),
    "a flipped bit in a header": lambda path: flip(path / PART_FILES[0], 0.01),
    "no rest": lambda path: (path / "meta.pt").unlink(),
    "a flipped bit in the rest": lambda path: flip(path / "meta.pt"),
    "no sums": lambda path: (path / "sums.json").unlink(),
}


def assert_refused(run_dir: Path) -> None:
    refuse_damaged(run_dir / "checkpoints" / "best.ckpt")  # it is whole
    with pytest.raises(UserError, match=r"checkpoints/last\.ckpt is damaged \(.*\): continue with .*/best\.ckpt$"):
        refuse_damaged(run_dir / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize("damage", FILE.values(), ids=FILE.keys())
def test_a_damaged_file(tmp_path: Path, finished: Path, damage: Damage) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    damage(run_dir / "checkpoints" / "last.ckpt")
    assert_refused(run_dir)


@pytest.mark.parametrize("damage", PARTS.values(), ids=PARTS.keys())
def test_a_damaged_folder(tmp_path: Path, sharded: Path, damage: Damage) -> None:
    run_dir = shutil.copytree(sharded, tmp_path / "run", symlinks=True)
    damage((run_dir / "checkpoints" / "last.ckpt").resolve())
    assert_refused(run_dir)


def test_fit_refuses_in_one_sentence_and_changes_nothing(
    shards: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    flip(run_dir / "checkpoints" / "last.ckpt")
    record = (run_dir / "run.json").read_bytes()
    assert main(fit_arguments(shards, run_dir, *SHORT)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("anlit: error")]
    assert len(errors) == 1
    assert f"continue with --ckpt_path {run_dir}/checkpoints/best.ckpt" in errors[0]
    assert (run_dir / "run.json").read_bytes() == record


def test_whoever_reads_looks_at_the_sums(tmp_path: Path, finished: Path, sharded: Path) -> None:
    """A copy of the file alone, too."""
    copy = shutil.copy(finished / "checkpoints" / "last.ckpt", tmp_path / "copy.ckpt")
    assert read_checkpoint(copy)["global_step"] == 20
    flip(Path(copy))
    with pytest.raises(DamagedError):
        read_checkpoint(copy)
    folder = shutil.copytree((sharded / "checkpoints" / "last.ckpt").resolve(), tmp_path / "folder")
    assert read_checkpoint(folder)["global_step"] == STEPS
    flip(folder / PART_FILES[0])
    with pytest.raises(DamagedError):
        read_checkpoint(folder)


@pytest.mark.parametrize("part", [PART_FILES[1], pytest.param("meta.pt", marks=pytest.mark.slow)])
def test_all_ranks_refuse_to_validate_a_damaged_folder(tmp_path: Path, sharded: Path, part: str) -> None:
    run_dir = shutil.copytree(sharded, tmp_path / "run", symlinks=True)
    last = run_dir / "checkpoints" / "last.ckpt"
    flip(last.resolve() / part)
    ranks = start_ranks(["validate", f"--config={run_dir}/config.yaml", f"--ckpt_path={last}"], 2, log=tmp_path / "log")
    for number, rank in enumerate(ranks):
        rank.join(120)
        said = (tmp_path / f"log.{number}").read_text()
        assert (rank.exitcode, "Traceback" in said) == (2, False), said
        assert "last.ckpt is damaged (" in said
        assert f"continue with --ckpt_path {run_dir}/checkpoints/best.ckpt" in said


def test_nothing_else_to_go_on_from_is_said(tmp_path: Path, finished: Path) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for name in ("last.ckpt", "best.ckpt"):
        flip(run_dir / "checkpoints" / name)
    with pytest.raises(UserError, match="the run has no other checkpoint"):
        refuse_damaged(run_dir / "checkpoints" / "last.ckpt")
