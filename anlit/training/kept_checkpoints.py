"""The files that a ModelCheckpoint keeps, in a checkpoint that may be moved or foreign.

A ModelCheckpoint saves absolute paths, removes the worst of these files, and lets loggers upload
them. Here a checkpoint holds names within the callback's folder. A continued run takes a name back
on two conditions. It continues from a file in this folder, and the named file exists.
"""

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from anlit.training.lightning_internals import callbacks_of_class, defer_save, is_save_deferred

SINGLE_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
"""The keys of a ModelCheckpoint's state that hold one path each."""
PATHS = (*SINGLE_PATHS, "best_k_models", "dirpath")
"""All keys of a ModelCheckpoint's state that hold paths."""
DEFERRED = "save_deferred"
"""The key that we add: whether the next checkpoint is due at the next validation."""


def paths_to_names(states: dict[Any, Any], trainer: L.Trainer) -> dict[Any, Any]:
    """The states of callbacks, with names within a ModelCheckpoint's folder for its paths."""
    named_states = dict(states)
    for callback in callbacks_of_class(trainer, ModelCheckpoint):
        if callback.state_key in states:
            state = states[callback.state_key]
            named_states[callback.state_key] = _with_names(state, callback)
    return named_states


def _with_names(state: dict[str, Any], callback: ModelCheckpoint) -> dict[str, Any]:
    """A ModelCheckpoint's state with names in place of paths."""
    folder = str(callback.dirpath)
    named = dict(state)
    for key in SINGLE_PATHS:
        named[key] = os.path.relpath(state[key], folder) if state[key] else ""
    named[DEFERRED] = is_save_deferred(callback)
    named["best_k_models"] = {}
    for path, score in state["best_k_models"].items():
        named["best_k_models"][os.path.relpath(path, folder)] = score
    named["dirpath"] = None
    return named


def restore_paths(states: dict[Any, Any], trainer: L.Trainer | None) -> dict[Any, Any]:
    """The states of callbacks, with paths for the files of this run's ModelCheckpoints.

    All other states with paths are left out. So no path comes out of a checkpoint.
    """
    restored = {}
    for key, state in states.items():
        has_paths = isinstance(state, dict) and any(name in state for name in PATHS)
        if not has_paths:
            restored[key] = state
    if trainer is None or trainer.state.fn != "fit":
        return restored
    callbacks = callbacks_of_class(trainer, ModelCheckpoint)
    if not _is_in_a_folder(trainer.ckpt_path, callbacks):
        return restored
    for callback in callbacks:
        state = states.get(callback.state_key)
        if isinstance(state, dict) and isinstance(state.get("best_k_models"), dict):
            state_with_paths = _with_paths(state, callback)
            restored[callback.state_key] = state_with_paths
            defer_save(callback, bool(state.get(DEFERRED)))
            _mark_as_written(state_with_paths, trainer)
    return restored


def _mark_as_written(state: dict[str, Any], trainer: L.Trainer) -> None:
    """Let the callback remove the files in its state, as files of this process."""
    written: set[str] = getattr(trainer.strategy.checkpoint_io, "written", set())
    written.update(state["best_k_models"])
    written.update(state[key] for key in SINGLE_PATHS if state[key])


def _with_paths(state: dict[str, Any], callback: ModelCheckpoint) -> dict[str, Any]:
    """A ModelCheckpoint's state with the paths of the files that its folder has."""
    scores: dict[str, Tensor] = {}
    for name, score in state["best_k_models"].items():
        path = _path_of(name, callback)
        if path and isinstance(score, Tensor) and score.numel() == 1:
            scores[path] = score
    restored = dict(state)
    for key in SINGLE_PATHS:
        restored[key] = _path_of(state.get(key), callback)
    restored["best_k_models"] = scores
    restored["dirpath"] = callback.dirpath
    if callback.monitor is not None:
        # As Lightning chooses them; a file of the saved state may be gone.
        lowest = min(scores, key=scores.__getitem__, default="")
        highest = max(scores, key=scores.__getitem__, default="")
        best, worst = (highest, lowest) if callback.mode == "max" else (lowest, highest)
        restored |= {"best_model_path": best, "best_model_score": scores.get(best)}
        restored |= {"kth_best_model_path": worst, "kth_value": scores.get(worst)}
    return restored


def _path_of(name: Any, callback: ModelCheckpoint) -> str:
    """The path of the file `name` in the callback's folder; "" without such a file.

    `name` may be the path already: a strategy may load a sharded checkpoint twice.
    """
    if not isinstance(name, str) or not name.endswith(callback.FILE_EXTENSION):
        return ""
    folder = str(callback.dirpath)
    path = os.path.join(folder, name)
    is_inside = Path(path).resolve().is_relative_to(Path(folder).resolve())
    return path if is_inside and Path(path).exists() else ""


def _is_in_a_folder(ckpt_path: Any, callbacks: list[ModelCheckpoint]) -> bool:
    """Whether a single-file or sharded checkpoint lies in a folder of the callbacks."""
    parent = Path(str(ckpt_path)).parent.resolve()
    folders = [Path(str(callback.dirpath)).resolve() for callback in callbacks]
    return any(parent.is_relative_to(folder) for folder in folders)
