"""Start a run from the weights of another one, without its optimizer, step or place in the data."""

import pickle
from pathlib import Path
from typing import Any

from torch import Tensor

from anlit.checkpoints.checkpoint_io import is_sharded, read_checkpoint
from anlit.checkpoints.exported import is_exported
from anlit.errors import UserError
from anlit.models.language_model import LanguageModel


def load_initial_weights(model: LanguageModel, path: str) -> None:
    """Copy the weights of a checkpoint into `model`, which must be of the same architecture and shape.

    Args:
        model: Not yet sharded or compiled.
        path: A checkpoint that anlit wrote.

    Raises:
        UserError: There is no such file, it is damaged or not anlit's, or its weights are those of another model.
    """
    content = _read(path)
    theirs, mine = content["anlit"]["architecture"], type(model).__name__
    if theirs.startswith("Folded"):
        raise UserError(
            f"initial_weights={path} holds a folded model, which cannot be trained: give the run's own checkpoint, or "
            "export it without --fold"
        )
    if theirs != mine:
        raise UserError(
            f"initial_weights={path} holds a {theirs}, but the configuration's model is {mine}: set --model {theirs} "
            "or choose another checkpoint"
        )
    given, own = content["state_dict"], model.state_dict()
    names = [*own, *(name for name in given if name not in own)]
    for name in names:
        there, here = _shape(given.get(name)), _shape(own.get(name))
        if there != here:
            raise UserError(
                f"initial_weights={path} does not fit the model ({name} is {there} there and {here} here): give the "
                "model's settings of the run that it comes from, with --config RUN/config.yaml"
            )
    model.load_state_dict(given)


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file() and not is_sharded(path) and not is_exported(path):
        raise UserError(f"initial_weights={path} is not a file: give a checkpoint such as RUN/checkpoints/best.ckpt")
    try:
        content = read_checkpoint(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
        raise UserError(
            f"initial_weights={path} cannot be read as a checkpoint ({reason}): choose another one from a run folder"
        ) from error
    if not isinstance(content, dict) or "anlit" not in content or "state_dict" not in content:
        raise UserError(
            f"initial_weights={path} is a checkpoint that anlit did not write: choose one from a run folder"
        )
    return content


def _shape(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "×".join(map(str, tensor.shape)) or "a number"
