"""A run saved under one strategy goes on under another; one that is continued under its own is exact."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from anlit.checkpoints.location import SHARDED
from tests.integration.conftest import assert_identical, assert_same_training_state, fit_arguments, last_checkpoint
from tests.integration.ranks import DDP, FSDP, column, run_ranks
from tests.integration.test_strategies import MUON, assert_same_training, weights

SAVED_AT, END = 6, 9
PART_FILES = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
SINGLE = [*FSDP, "--trainer.strategy.sharded_checkpoints=false"]
BACKGROUND = [*FSDP, "--trainer.strategy.async_checkpoints=true"]
SETTINGS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []), "ddp2": (2, DDP), "fsdp2": (2, FSDP), "fsdp4": (4, FSDP),
    "single2": (2, SINGLE), "async2": (2, BACKGROUND),
}  # fmt: skip
CONSTANT_RATE = ("--model.schedule.final=1", "--model.schedule.warmup=0")
"""The rate does not depend on max_steps, so that a run of fewer steps is the beginning of a longer one."""

Saved = Callable[..., Path]
slow = pytest.mark.slow


def matrix_arguments(shards: Path, run_dir: Path, setting: str, steps: int, *extra: str, model: str) -> list[str]:
    n_ranks, strategy = SETTINGS[setting]
    return fit_arguments(
        shards, run_dir, f"--data.batch_size={8 // n_ranks}", f"--trainer.max_steps={steps}", *CONSTANT_RATE,
        "--trainer.val_check_interval=3", "--checkpoint_every_n_steps=4", *strategy, *extra, model=model,
    )  # fmt: skip


def run_with(arguments: list[str], setting: str) -> None:
    n_ranks = SETTINGS[setting][0]
    assert run_ranks(arguments, n_ranks) == [0] * n_ranks


@pytest.fixture(scope="module")
def saved(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(setting, steps, more settings)` → the folder of a run of so many steps; each run is made once."""
    made: dict[tuple, Path] = {}

    def run(setting: str, steps: int = SAVED_AT, *extra: str, model: str = "AnGPT") -> Path:
        key = (setting, steps, extra, model)
        if key not in made:
            run_dir = tmp_path_factory.mktemp("run")
            run_with(matrix_arguments(shards, run_dir, setting, steps, *extra, model=model), setting)
            made[key] = run_dir
        return made[key]

    return run


def continued(
    shards: Path, run_dir: Path, copy: Path, setting: str, *extra: str, links: bool = True, model: str = "AnGPT"
) -> Path:
    """A copy of a run, taken to END steps."""
    shutil.copytree(run_dir, copy, symlinks=links)
    run_with(matrix_arguments(shards, copy, setting, END, "--ckpt_path=last", *extra, model=model), setting)
    return copy


FAST = [("fsdp2", "one"), ("one", "fsdp2")]
MATRIX = [(a, b) for a in ("one", "ddp2", "fsdp2", "fsdp4") for b in ("one", "ddp2", "fsdp2")]
MATRIX += [("single2", b) for b in ("one", "ddp2", "fsdp2")] + [("one", "single2"), ("fsdp2", "single2")]
MATRIX += [("async2", "one"), ("fsdp2", "async2"), ("fsdp2", "fsdp4")]


@pytest.mark.parametrize(("there", "here"), [p if p in FAST else pytest.param(*p, marks=slow) for p in MATRIX])
def test_saved_there_continued_here(shards: Path, tmp_path: Path, saved: Saved, there: str, here: str) -> None:
    whole = saved("one", END)
    run_dir = continued(shards, saved(there), tmp_path / "copy", here)
    assert len(column(run_dir, "train/loss")) == END
    assert_same_training(run_dir, whole)
    assert last_checkpoint(run_dir)["global_step"] == END


@slow
@pytest.mark.parametrize("model", ["GPT", "NGPT"])
@pytest.mark.parametrize(("there", "here"), [("one", "fsdp2"), ("fsdp2", "ddp2"), ("single2", "one")])
def test_other_architectures(shards: Path, tmp_path: Path, saved: Saved, there: str, here: str, model: str) -> None:
    run_dir = continued(shards, saved(there, model=model), tmp_path / "copy", here, model=model)
    assert_same_training(run_dir, saved("one", END, model=model))


@slow
@pytest.mark.parametrize(("there", "here"), [("one", "fsdp2"), ("fsdp2", "one"), ("single2", "ddp2")])
def test_muon_and_its_state(shards: Path, tmp_path: Path, saved: Saved, there: str, here: str) -> None:
    muon = ("--model.optimizer=anlit.MuonAdamW", "--model.optimizer.embedding_lr=0.002")
    run_dir = continued(shards, saved(there, SAVED_AT, *muon), tmp_path / "copy", here, *muon)
    assert_same_training(run_dir, saved("one", END, *muon), factor=MUON)


@slow
@pytest.mark.parametrize("setting", ["fsdp2", "ddp2", "single2"])
def test_continued_on_the_same_ranks_is_identical(shards: Path, tmp_path: Path, saved: Saved, setting: str) -> None:
    dropout = "--model.dropout=0.1"
    run_dir = continued(shards, saved(setting, SAVED_AT, dropout), tmp_path / "copy", setting, dropout)
    assert_same_training_state(last_checkpoint(run_dir), last_checkpoint(saved(setting, END, dropout)))


def test_written_in_the_background_is_the_same(saved: Saved) -> None:
    now, later = last_checkpoint(saved("fsdp2")), last_checkpoint(saved("async2"))
    assert_same_training_state(now, later)
    assert_identical(now["loops"], later["loops"], "loops")
    names = [sorted(p.name for p in (saved(s) / "checkpoints" / "last.ckpt").iterdir()) for s in ("fsdp2", "async2")]
    assert names[0] == names[1] == ["meta.pt", *PART_FILES, "sums.json"]


def test_a_tied_head_is_written_once(saved: Saved) -> None:
    """safetensors refuses tensors that share memory."""
    weights = last_checkpoint(saved("fsdp2", 3, "--model.tie_embeddings=true", model="GPT"))["state_dict"]
    assert weights["model.head.weight"] is weights["model.embedding.weight"]


def test_one_folder_for_each_name(saved: Saved) -> None:
    """What a name stood for before is removed."""
    checkpoints = saved("fsdp2") / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [SHARDED, "best.ckpt", "last.ckpt"]
    named = {(checkpoints / name).resolve() for name in ("best.ckpt", "last.ckpt")}
    assert {p.resolve() for p in (checkpoints / SHARDED).iterdir()} == named


@pytest.mark.parametrize("setting", ["one", pytest.param("ddp2", marks=slow), pytest.param("fsdp2", marks=slow)])
def test_validate_reads_parts(shards: Path, saved: Saved, setting: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = saved("fsdp2")
    arguments = matrix_arguments(shards, run_dir, setting, SAVED_AT, model="AnGPT")
    arguments = ["validate", *(a for a in arguments[1:] if not a.startswith(("--run_dir", "--checkpoint_every")))]
    capfd.readouterr()
    run_with([*arguments, f"--ckpt_path={run_dir}/checkpoints/last.ckpt"], setting)
    printed = re.search(r"val/loss\D+([\d.]+)", capfd.readouterr().out)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(column(run_dir, "val/loss")[-1], rel=1e-6)


@slow
def test_a_copy_without_links_goes_on(shards: Path, tmp_path: Path, saved: Saved) -> None:
    """As a copy from a bucket or by `cp -L` is; its folders make way for links."""
    run_dir = continued(shards, saved("fsdp2"), tmp_path / "copy", "fsdp2", links=False)
    assert_identical(weights(run_dir), weights(saved("fsdp2", END)), "weights")
    assert (run_dir / "checkpoints" / "last.ckpt").is_symlink()
