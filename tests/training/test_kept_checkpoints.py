"""The files in a ModelCheckpoint's state, of which a continued run takes back its own alone.

tests/integration/test_kept_checkpoints.py has runs that are killed.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from anlit.training.kept_checkpoints import paths_to_names, restore_paths

SCORES = {"a.ckpt": 3.0, "b.ckpt": 4.0, "c.ckpt": 2.0}

LAST = "last.ckpt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the run's checkpoints are, beside a file that is not the run's."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in [*SCORES, LAST]:
        (folder / name).touch()
    (tmp_path / "outside.ckpt").touch()
    return folder


def make_trainer(folder: Path, mode: str = "min") -> Any:
    """A Trainer that continues from a file of its ModelCheckpoint."""
    callback = ModelCheckpoint(folder, monitor="val/loss", mode=mode, save_top_k=3)
    return SimpleNamespace(
        callbacks=[callback],
        ckpt_path=str(folder / "a.ckpt"),
        state=SimpleNamespace(fn="fit"),
        strategy=SimpleNamespace(checkpoint_io=SimpleNamespace(written=set())),
    )


def restored(trainer: Any, scores: dict[str, float], **changes: Any) -> dict[str, Any]:
    """The state of the callback after a save and a restart of a run with these scores."""
    (callback,) = trainer.callbacks
    callback.best_k_models = {}
    for name, score in scores.items():
        callback.best_k_models[str(Path(callback.dirpath) / name)] = torch.tensor(score)
    states = {callback.state_key: callback.state_dict()}
    named = paths_to_names(states, trainer)[callback.state_key]
    state: dict[str, Any] = restore_paths({callback.state_key: named | changes}, trainer)[
        callback.state_key
    ]
    return state


@pytest.mark.parametrize(
    ("mode", "best", "worst"), [("min", "c.ckpt", "b.ckpt"), ("max", "b.ckpt", "c.ckpt")]
)
def test_the_best_and_the_worst_file_are_those_of_the_scores(folder, mode, best, worst) -> None:
    trainer = make_trainer(folder, mode)

    state = restored(trainer, SCORES, last_model_path=LAST)

    assert state["best_model_path"] == str(folder / best)
    assert state["best_model_score"] == SCORES[best]
    assert state["kth_best_model_path"] == str(folder / worst)
    assert state["kth_value"] == SCORES[worst]
    assert len(state["best_k_models"]) == 3
    assert state["last_model_path"] == str(folder / LAST)
    files = {str(folder / name) for name in [*SCORES, LAST]}
    assert trainer.strategy.checkpoint_io.written == files


def test_a_run_that_had_no_validation_has_no_best_file(folder: Path) -> None:
    state = restored(make_trainer(folder), {})

    assert state["best_k_models"] == {}
    assert state["best_model_path"] == ""
    assert state["best_model_score"] is None


def test_a_file_that_is_gone_or_outside_of_the_folder_is_not_taken_back(folder: Path) -> None:
    (folder / "c.ckpt").unlink()
    trainer = make_trainer(folder)
    scores = SCORES | {"../outside.ckpt": 1.0}

    state = restored(trainer, scores, last_model_path="../outside.ckpt")

    assert {Path(path).name for path in state["best_k_models"]} == {"a.ckpt", "b.ckpt"}
    assert state["best_model_path"] == str(folder / "a.ckpt")
    assert state["last_model_path"] == ""


@pytest.mark.parametrize(
    ("function", "checkpoint"), [("fit", "../outside.ckpt"), ("validate", "a.ckpt")]
)
def test_only_a_run_that_continues_from_its_own_folder_takes_back_files(
    folder: Path, function: str, checkpoint: str
) -> None:
    trainer = make_trainer(folder)
    (callback,) = trainer.callbacks
    trainer.state.fn = function
    trainer.ckpt_path = str(folder / checkpoint)
    states = {callback.state_key: callback.state_dict(), "other": {"step": 1}}

    assert restore_paths(states, trainer) == {"other": {"step": 1}}
    assert restore_paths(states, None) == {"other": {"step": 1}}


def test_the_folder_may_be_of_another_model_checkpoint(folder: Path) -> None:
    trainer = make_trainer(folder)
    trainer.callbacks.append(ModelCheckpoint(folder.parent / "others", save_last=True))
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}

    assert restore_paths(paths_to_names(states, trainer), trainer).keys() == states.keys()


@pytest.mark.parametrize("damaged", [None, {"best_k_models": None}])
def test_a_damaged_state_is_left_out(folder: Path, damaged: Any) -> None:
    trainer = make_trainer(folder)
    (callback,) = trainer.callbacks

    assert not restore_paths({callback.state_key: damaged}, trainer).get(callback.state_key)
