"""Links out of a run folder, paths in a checkpoint, and names of files that are not UTF-8."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from anlit import GPT
from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from anlit.checkpoints.location import CHECKPOINTS, SHARDED
from anlit.checkpoints.writing import remove_unnamed
from anlit.cli import main
from tests.data.modules import quiet_trainer
from tests.integration.conftest import fit_arguments
from tests.integration.run_files import contents, file_names
from tests.nn.models.tiny import adamw, batches, tiny

SHORT = ("--trainer.max_steps=2", "--trainer.val_check_interval=2", "--ckpt_path=last")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that belongs to no run."""
    (tmp_path / "outside" / "last-1").mkdir(parents=True)
    for name in ("last-1/text", "last.ckpt"):
        (tmp_path / "outside" / name).write_text("keep")
    return tmp_path / "outside"


def test_a_partial_file_that_is_a_link_is_replaced(
    shards: Path, tmp_path: Path, outside: Path
) -> None:
    contents_before = contents(outside)
    checkpoints = tmp_path / "run" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    (checkpoints / ".partial-last.ckpt").symlink_to(outside / "last.ckpt")

    assert main(fit_arguments(shards, tmp_path / "run", *SHORT)) == 0

    assert contents(outside) == contents_before
    assert not (checkpoints / "last.ckpt").is_symlink()


@pytest.mark.parametrize(
    "name", ["metrics.csv", ".fit.lock", CHECKPOINTS, f"{CHECKPOINTS}/{SHARDED}"]
)
def test_nothing_of_a_run_is_written_through_a_link(
    shards: Path, tmp_path: Path, outside: Path, name: str, refusal
):
    contents_before = contents(outside)
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    target = outside if CHECKPOINTS in name else outside / "last.ckpt"
    path.symlink_to(target)

    error = refusal(*fit_arguments(shards, tmp_path / "run", *SHORT))

    assert f"{path} is a link to {target}, and a run writes into its own folder" in error
    assert contents(outside) == contents_before


def test_what_is_a_link_or_has_a_name_is_no_leftover(tmp_path: Path, outside: Path) -> None:
    contents_before = contents(outside)
    folder = tmp_path / "run" / SHARDED
    (folder / "last-2").mkdir(parents=True)
    (folder / "last-0").symlink_to(outside, target_is_directory=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / SHARDED).symlink_to(outside, target_is_directory=True)

    for checkpoints in ("run", "linked"):
        remove_unnamed(tmp_path / checkpoints)

    assert file_names(folder) == {"last-0"}
    assert contents(outside) == contents_before


def test_a_folder_of_another_name_or_run_is_not_removed_with_a_checkpoint(tmp_path: Path) -> None:
    own_folder = tmp_path / "run" / SHARDED / "last-1"
    foreign_folder = tmp_path / "other" / SHARDED / "last-2"
    best = tmp_path / "run" / "best.ckpt"
    last = tmp_path / "run" / "last.ckpt"
    for named, link in ((own_folder, best), (foreign_folder, last)):
        named.mkdir(parents=True)
        link.symlink_to(named)

    storage = AtomicCheckpointIO()
    storage.save_checkpoint({"step": 1}, last)
    assert read_checkpoint(last) == {"step": 1}
    assert foreign_folder.is_dir()
    storage.remove_checkpoint(best)
    assert own_folder.is_dir(), "this process did not write it"
    storage.written.add(str(best))
    storage.remove_checkpoint(best)
    assert not own_folder.exists()


def change_states(source: Path, target: Path, **state: Any) -> None:
    """Write a copy of a checkpoint in which every ModelCheckpoint's state has these values."""
    content = torch.load(source, weights_only=True)
    n_changed = 0
    for state_of_callback in content["callbacks"].values():
        if "best_model_path" in state_of_callback:
            state_of_callback |= state
            n_changed += 1
    assert n_changed
    torch.save(content, target)


def fit_with_kept_checkpoints(
    folder: Path, max_steps: int, ckpt_path: Path | None = None
) -> L.Trainer:
    """Train with a user's Trainer, which keeps the best and the last checkpoint."""
    each_step: dict[str, Any] = {"dirpath": folder, "every_n_train_steps": 1}
    callbacks: list[L.Callback] = [
        ModelCheckpoint(filename="{step}", monitor="train/loss", save_top_k=1, **each_step),
        ModelCheckpoint(filename="last", enable_version_counter=False, **each_step),
    ]
    trainer = quiet_trainer(max_steps=max_steps, enable_checkpointing=True, callbacks=callbacks)
    model = tiny(GPT, optimizer=adamw(lr=0.01))
    trainer.fit(model, batches(64, 16), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_trainer_of_ones_own_removes_nothing_that_a_checkpoint_names(
    tmp_path: Path, outside: Path, scheme
) -> None:
    contents_before = contents(outside)
    foreign = tmp_path / "foreign.ckpt"
    path = f"{scheme}{outside}"
    worst = torch.tensor(9e9)
    paths = dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), path)
    states = {**paths, "best_k_models": {path: worst}, "kth_value": worst}
    fit_with_kept_checkpoints(tmp_path / "checkpoints", 2)
    change_states(tmp_path / "checkpoints" / "last.ckpt", foreign, **states)

    second = fit_with_kept_checkpoints(tmp_path, 4, foreign)

    assert second.global_step == 4
    assert contents(outside) == contents_before
    for callback in second.checkpoint_callbacks:
        assert str(outside) not in callback.best_model_path


def test_a_continued_run_keeps_its_best_checkpoint_where_later_ones_are_worse(
    shards: Path, finished: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    last = folder / "checkpoints" / "last.ckpt"
    best = folder / "checkpoints" / "best.ckpt"
    lowest = torch.tensor(0.0)  # no later loss is below it
    change_states(last, last, best_k_models={"best.ckpt": lowest}, best_model_score=lowest)
    contents_before = best.read_bytes()

    longer = ("--ckpt_path=last", "--trainer.max_steps=24")
    assert main(fit_arguments(shards, folder, *longer)) == 0

    assert best.read_bytes() == contents_before


def test_files_whose_names_are_not_utf8_are_read_and_written(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "caf\udce9.txt"
    text.write_text("the cat sat")
    output = tmp_path / "caf\udce9.parquet"

    assert main(["generate", str(finished), f"--prompts={text}", "--max_tokens=2"]) == 0
    generated = capsys.readouterr().out
    assert main(["score", str(finished), str(text), f"--output={output}", "--json"]) == 0
    totals = json.loads(capsys.readouterr().out)

    assert generated.startswith("the cat sat")
    assert math.isfinite(totals["nats"])
    with output.open("rb") as file:
        rows = pq.read_table(file).to_pydict()
    assert set(rows["source"]) == {f"{tmp_path}/caf\\xe9.txt, the file"}
