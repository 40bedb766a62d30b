"""The list of files that a ModelCheckpoint keeps, in a checkpoint that may be moved or be somebody else's.

A ModelCheckpoint saves absolute paths, removes the worst of them, and lets loggers upload them.
Here a checkpoint holds names within the callback's own folder. A continued run takes a name back
only if the run goes on from a file in its own folder and the named file is there.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from anlit.training.lightning_internals import defer_save, is_save_deferred

SINGLE = ("best_model_path", "kth_best_model_path", "last_model_path")
"""The keys of a ModelCheckpoint's state that hold one path each."""
PATHS = (*SINGLE, "best_k_models", "dirpath")
DEFERRED = "save_deferred"


def with_names(states: dict[Any, Any], trainer: L.Trainer) -> dict[Any, Any]:
    """The states of callbacks, in which a ModelCheckpoint has names within its folder for paths."""
    named = dict(states)
    for callback in _model_checkpoints(trainer):
        if callback.state_key in states:
            named[callback.state_key] = _named(states[callback.state_key], callback)
    return named


def _named(state: dict[str, Any], callback: ModelCheckpoint) -> dict[str, Any]:
    folder = str(callback.dirpath)
    scores = {os.path.relpath(path, folder): x for path, x in state["best_k_models"].items()}
    names = {}
    for key in SINGLE:
        names[key] = os.path.relpath(state[key], folder) if state[key] else ""
    deferred = {DEFERRED: is_save_deferred(callback)}
    return {**state, **names, **deferred, "best_k_models": scores, "dirpath": None}


def with_own_paths(states: dict[Any, Any], trainer: L.Trainer | None) -> dict[Any, Any]:
    """The states of callbacks, in which each ModelCheckpoint of this run has its own files again.

    What others have is left out, so that no path comes out of a checkpoint.
    """
    taken = {}
    for key, state in states.items():
        if not (isinstance(state, dict) and any(name in state for name in PATHS)):
            taken[key] = state
    if trainer is None or trainer.state.fn != "fit":
        return taken
    callbacks = _model_checkpoints(trainer)
    if not _is_in_one_of(trainer.ckpt_path, callbacks):
        return taken
    for callback in callbacks:
        state = states.get(callback.state_key)
        if isinstance(state, dict) and isinstance(state.get("best_k_models"), dict):
            taken[callback.state_key] = own = _own(state, callback)
            defer_save(callback, bool(state.get(DEFERRED)))
            # It may remove them, as if this process had written them.
            written: set[str] = getattr(trainer.strategy.checkpoint_io, "written", set())
            written.update(own["best_k_models"], filter(None, (own[key] for key in SINGLE)))
    return taken


def _own(state: dict[str, Any], callback: ModelCheckpoint) -> dict[str, Any]:
    """The state with the paths of those files that are in the callback's folder."""
    scores: dict[str, Tensor] = {}
    for name, score in state["best_k_models"].items():
        path = _path_of(name, callback)
        if path and isinstance(score, Tensor) and score.numel() == 1:
            scores[path] = score
    paths = {key: _path_of(state.get(key), callback) for key in SINGLE}
    own = {**state, **paths, "best_k_models": scores, "dirpath": callback.dirpath}
    if callback.monitor is None:
        return own
    ranked = sorted(scores, key=lambda path: float(scores[path]), reverse=callback.mode == "max")
    if paths["best_model_path"] not in scores:
        best = ranked[0] if ranked else ""
        own |= {"best_model_path": best, "best_model_score": scores.get(best)}
    if paths["kth_best_model_path"] not in scores:
        worst = ranked[-1] if ranked else ""
        own |= {"kth_best_model_path": worst, "kth_value": scores.get(worst)}
    return own


def _path_of(name: Any, callback: ModelCheckpoint) -> str:
    """The path of a file of this name in the callback's folder; "" if there is none.

    `name` may be the path already: a strategy may load a checkpoint's parts twice.
    """
    if not isinstance(name, str) or not name.endswith(callback.FILE_EXTENSION):
        return ""
    folder = str(callback.dirpath)
    path = os.path.join(folder, name)
    is_inside = Path(path).resolve().is_relative_to(Path(folder).resolve())
    return path if is_inside and Path(path).exists() else ""


def _is_in_one_of(ckpt_path: Any, callbacks: Iterable[ModelCheckpoint]) -> bool:
    """Whether a checkpoint lies in the folder of one of the callbacks, also as one in parts."""
    folder = Path(str(ckpt_path)).parent.resolve()
    own = [Path(str(callback.dirpath)).resolve() for callback in callbacks]
    return any(folder.is_relative_to(path) for path in own)


def _model_checkpoints(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
