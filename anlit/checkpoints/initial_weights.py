"""Start a run from the weights of another one, without its optimizer, step or position in the data.

The attention mechanism may be another one. Its own weights then keep their initial values.
"""

import logging
from pathlib import Path
from typing import Any

from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX
from anlit.checkpoints.loading import read_model
from anlit.checkpoints.location import is_checkpoint, is_exported
from anlit.configuration import attention_label, class_name, init_args
from anlit.errors import UserError
from anlit.models.continuing import refuse_other_shapes
from anlit.models.language_model import LanguageModel
from anlit.settings import to_plain_values

OF_MECHANISMS = (".attention.mechanism.", ".shared_coefficients.")
"""In the names of mechanisms' own weights."""

_log = logging.getLogger(__name__)


def load_initial_weights(model: LanguageModel, path: str) -> None:
    """Copy the weights of a checkpoint into `model`, which must be of the same architecture and shape.

    If the attention mechanism differs, a line in the log names both.

    Args:
        model: The model, not yet sharded or compiled.

    Raises:
        UserError: There is no such file, it is damaged, anlit did not write it, or its weights do not fit the model.
    """
    given = f"initial_weights={path}"
    if not is_checkpoint(path) and not is_exported(path):
        raise UserError(f"{given} is not a file: give a checkpoint such as RUN/checkpoints/best.ckpt")
    content = read_model(Path(path))
    saved, expected = content["anlit"]["architecture"], type(model).__name__
    if saved.startswith("Folded"):
        raise UserError(
            f"{given} holds a folded model, which cannot be trained: give the run's checkpoint, or export it without "
            "--fold"
        )
    if saved != expected:
        raise UserError(
            f"{given} holds a {saved}, but the configuration's model is {expected}: set --model {saved} or choose "
            "another checkpoint"
        )
    saved_weights, weights = content["state_dict"], model.state_dict()
    then = content["hyper_parameters"].get("attention")
    now = to_plain_values(dict(model.hparams)).get("attention")
    if _mechanisms(then) != _mechanisms(now):
        _log.info(
            f"attention is {attention_label(then)} in {given} and {attention_label(now)} in the model: what the "
            "mechanism itself learns starts from its initial values"
        )
        saved_weights, weights_of_mechanism = (
            {name: value for name, value in weights.items() if any(part in name for part in OF_MECHANISMS) == own}
            for weights, own in ((saved_weights, False), (weights, True))
        )
        saved_weights |= weights_of_mechanism
    refuse_other_shapes(saved_weights, weights, given)
    if model.model.tie_embeddings and not saved_weights[PREFIX + EMBEDDING].equal(saved_weights[PREFIX + HEAD]):
        raise UserError(f"{given} has an embedding and a head that differ: leave out model.tie_embeddings")
    model.load_state_dict(saved_weights)
    model.family = content["anlit"].get("family")


def _mechanisms(plain: Any) -> list[str]:
    """The classes in the settings of an attention mechanism, outer ones first."""
    if isinstance(plain, list):
        return [name for part in plain for name in _mechanisms(part)]
    if not isinstance(plain, dict):
        return []
    return [class_name(plain) or "Plain", *_mechanisms(list(init_args(plain).values()))]
