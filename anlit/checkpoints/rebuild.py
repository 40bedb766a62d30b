"""Builds the model of a checkpoint, without running any code that the checkpoint names."""

from pathlib import Path
from typing import Any

from torch import Tensor

import anlit.attention.mechanisms  # noqa: F401  a checkpoint may name any of them; what is not imported is refused
from anlit.errors import UserError
from anlit.models import angpt, fold, gpt, ngpt  # noqa: F401  as above
from anlit.models.language_model import LanguageModel
from anlit.settings import build, subclass_named

OF_TRAINING = ("optimizer",)
"""Settings that only training needs; a loaded model has the default ones."""
EMBEDDING, BLOCKS, MLP = "model.embedding.weight", "model.blocks.", "W_u.weight"


def rebuild(content: dict[str, Any], file: Path, changes: dict[str, Any]) -> LanguageModel:
    """The model with its weights, on the CPU in float32.

    Args:
        content: The checkpoint, with hyper_parameters and state_dict.
        file: The file of the checkpoint, for messages.
        changes: Constructor arguments to replace.

    Raises:
        UserError: It names a class that may not be built, or its settings do not fit its weights.
        ValueError: A class refuses a setting.
    """
    kind = subclass_named(LanguageModel, content["anlit"]["architecture"], f"{file}: architecture")
    settings, weights = settings_of(content), content["state_dict"]
    _check_sizes(settings, weights, kind, file)
    model = build(kind, settings | changes, f"{file}: model")
    model.configure_model()
    for name, weight in model.state_dict().items():
        if name in weights and weights[name].is_floating_point() != weight.is_floating_point():
            raise UserError(f"{file} has {weights[name].dtype} for the weights {name}: choose another checkpoint")
    model.load_state_dict(weights)
    return model


def settings_of(content: dict[str, Any]) -> dict[str, Any]:
    """The model's constructor arguments as plain values, without those for training."""
    saved = content["hyper_parameters"].items()
    return {name: value for name, value in saved if not name.startswith("_") and name not in OF_TRAINING}


def _check_sizes(settings: dict[str, Any], weights: dict[str, Tensor], kind: type, file: Path) -> None:
    """Refuse settings that do not have the size of the weights, before a model of that size is built."""
    storages = [tensor.untyped_storage() for tensor in weights.values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if claimed > 2 * held:  # views of a small tensor can claim any shape; twice, for a weight that two layers share
        raise UserError(f"{file} claims {claimed:,} bytes of weights and holds {held:,}: choose another checkpoint")
    layers = {name.split(".")[2] for name in weights if name.startswith(BLOCKS)}
    sizes = {"n_layers": len(layers)}
    sizes["vocab_size"], sizes["d_model"] = _shape(weights, EMBEDDING, file)
    first_mlp = f"{BLOCKS}0.{MLP}"
    if first_mlp in weights or (layers and kind.__module__.startswith("anlit.")):  # others may have another MLP
        sizes["d_ff"] = _shape(weights, first_mlp, file)[0]
    for name, size in sizes.items():
        if settings.get(name, size) not in (size, None):
            raise UserError(
                f"{file} says that {name} is {str(settings[name])[:20]}, but its weights are those of {name}={size}: "
                "choose another checkpoint"
            )


def _shape(weights: dict[str, Tensor], name: str, file: Path) -> tuple[int, int]:
    if name not in weights or weights[name].dim() != 2:
        raise UserError(f"{file} has no matrix {name} among its weights: choose another checkpoint")
    rows, columns = weights[name].shape
    return rows, columns
