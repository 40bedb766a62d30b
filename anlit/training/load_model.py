"""From a checkpoint to the model in it, or to a new run's weights, without running any code that it names."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A checkpoint may name any class of these; a class that is not imported is refused.
import anlit.nn.mechanisms
import anlit.training.models  # noqa: F401
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX
from anlit.checkpoints.integrity import MODEL, UNREADABLE, DamagedError, reason, require_content
from anlit.checkpoints.location import CHECKPOINTS, find_checkpoint
from anlit.checkpoints.weights import refuse_non_finite, refuse_other_shapes
from anlit.config.labels import (
    ARCHITECTURES,
    CONFIG,
    attention_label,
    class_name,
    init_args,
    mapping,
)
from anlit.config.objects import build_from_plain, subclass_named, to_plain_values
from anlit.errors import UserError
from anlit.io.read import check_content, read_yaml
from anlit.nn.models.runtime import allow_compiled_kernels, prepare_cpu, without_values
from anlit.training.language_model import LanguageModel
from anlit.training.resume_checks import TAKEN, changes

BLOCKS, MLP = "model.blocks.", "model.blocks.0.W_u.weight"
OF_MECHANISM = (
    ".attention.mechanism.",
    ".shared_coefficients.",
)  # in the names of what a mechanism learns

SAID_OR_TAKEN = ("model.attention", "model.optimizer", *TAKEN)
"""Settings that other weights may come with: the mechanism has a line of its own."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model and its origin."""

    model: LanguageModel  # in eval mode, float32, on the requested device
    file: Path
    step: int  # number of optimizer steps after which it was written
    config: dict[str, Any] | None  # the run's config.yaml; None if the file is not in a run folder
    trained_on: (
        dict[str, Any] | None
    )  # `TokenShards.fingerprint` of the training data; None if it is not known
    settings: dict[
        str, Any
    ]  # the model's constructor arguments as plain values, without those for training
    family: str | None = (
        None  # transformers' model_type of what its first weights were imported from
    )
    family_length: int | None = None  # its context length

    @property
    def architecture(self) -> str:
        """The model's class: GPT, NGPT or AnGPT."""
        return type(self.model).__name__

    @property
    def label(self) -> str:
        """Architecture and attention mechanism, such as `anGPT, scale-invariant`."""
        name = ARCHITECTURES.get(self.architecture, self.architecture)
        return f"{name}, {attention_label(self.settings.get('attention'))}"

    @property
    def training_length(self) -> int:
        """Tokens in a training sequence."""
        return self.model.context_length

    @property
    def longest_context(self) -> int:
        """Tokens that it was trained on in one sequence, here or before it was imported."""
        return max(self.training_length, self.family_length or 0)

    @property
    def is_trained_here(self) -> bool:
        """Whether anlit trained it; else it was imported, and its settings tell nothing of its data."""
        return self.family is None or self.trained_on is not None

    @property
    def run(self) -> Path | None:
        """The run folder of the file; None if there is none."""
        return self.file.parent.parent if self.config is not None else None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_checkpoint(path: str, device: str = "auto", **changes: Any) -> Checkpoint:
    """Load the model of a run folder (its best checkpoint, else its last) or of a .ckpt file.

    Args:
        device: A torch device, or auto for the GPU if there is one.
        changes: Constructor arguments to replace, such as kernel="eager".

    Raises:
        UserError: There is no checkpoint, it is damaged or anlit did not write it, or the device cannot be used.
    """
    target = find_device(device)
    if target.type == "cpu":
        prepare_cpu()
    file = find_checkpoint(path)
    content = read_model(file)
    saved, record = content["hyper_parameters"], content["anlit"]
    settings = {
        name: saved[name] for name in saved if not name.startswith("_") and name != "optimizer"
    }
    with _reading(file):
        model = rebuild(content, settings | changes, file).to(target).eval().requires_grad_(False)
    refuse_non_finite(model.state_dict(), str(file))
    allow_compiled_kernels(model.model, 0, model.context_length)  # a tool that reads much allows it
    own, advice = file.parent.parent / CONFIG, "correct it, or copy the checkpoint elsewhere"
    in_run = file.parent.name == CHECKPOINTS and own.exists()
    config = mapping(read_yaml(own, advice=advice)) if in_run else None
    return Checkpoint(
        model,
        file,
        content["global_step"],
        config,
        record.get("data"),
        settings,
        record.get("family"),
        record.get("family_length"),
    )


def find_device(name: str) -> torch.device:
    """The device `name`; auto is the GPU if there is one. Raises UserError if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise UserError(
            f"--device {name} cannot be used here: choose auto, cpu, or a device that is there"
        ) from error


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turns what a damaged or foreign checkpoint raises into a UserError."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        advice = "choose another one from a run folder"
        raise UserError(
            f"{file} cannot be read as a checkpoint ({reason(error)}): {advice}"
        ) from error


def read_model(file: Path) -> dict[str, Any]:
    """The content of a checkpoint with all that a model needs; raises UserError if it is damaged or foreign."""
    with _reading(file):
        content = read_checkpoint(file)
        require_content(content, MODEL | {"state_dict": dict})
        data, family = (
            {"tokenizer_sha256": str, "vocab_size": int},
            {"family": str, "family_length": int},
        )
        check_content(content, {"anlit": {"data": data, **family}})
        if not all(isinstance(weight, Tensor) for weight in content["state_dict"].values()):
            raise DamagedError("not all of state_dict are tensors")
        return content


def rebuild(content: dict[str, Any], settings: dict[str, Any], file: Path) -> LanguageModel:
    """The model with its weights, in float32 on torch's default device.

    Raises UserError if it names a class that may not be built, ValueError if settings and weights do not fit.
    """
    architecture = subclass_named(
        LanguageModel, content["anlit"]["architecture"], f"{file}: architecture"
    )
    weights = content["state_dict"]
    _refuse_other_sizes(settings, weights, architecture)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is an instance of `nn.Module`.*")
        with without_values():
            model = build_from_plain(architecture, settings, f"{file}: model")
        takes_weights = all(map(_is_ours, model.model.modules()))
        if not takes_weights:  # a class of the user's may make tensors that are no weights
            model = build_from_plain(architecture, settings, f"{file}: model")
            model.configure_model()
    for name, weight in model.state_dict().items():
        if name in weights and weights[name].is_floating_point() != weight.is_floating_point():
            raise DamagedError(f"it has {weights[name].dtype} for the weights {name}")
    if takes_weights:
        model.load_state_dict({name: _wide(weights[name]) for name in weights}, assign=True)
        model.model.complete()
    else:
        model.load_state_dict(weights)
    return model


def _is_ours(module: Any) -> bool:
    return type(module).__module__.startswith(("anlit.", "torch."))


def _wide(weight: Tensor) -> Tensor:
    return weight.float() if weight.is_floating_point() else weight


def _refuse_other_sizes(
    settings: dict[str, Any], weights: dict[str, Tensor], architecture: type
) -> None:
    """Refuse settings that do not have the size of the weights, before a model of that size is built."""
    storages = [tensor.untyped_storage() for tensor in weights.values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    claimed = sum(tensor.nbytes for tensor in weights.values())
    if (
        claimed > 2 * held
    ):  # views of a small tensor can claim any shape; twice, for a weight that two layers share
        raise DamagedError(f"it claims {claimed:,} bytes of weights and holds {held:,}")
    layers = {name.split(".")[2] for name in weights if name.startswith(BLOCKS)}
    sizes, matrices = {"n_layers": len(layers)}, {PREFIX + EMBEDDING: ("vocab_size", "d_model")}
    if MLP in weights or (
        layers and architecture.__module__.startswith("anlit.")
    ):  # others may have another MLP
        matrices[MLP] = ("d_ff", "d_model")
    for name, axes in matrices.items():
        if name not in weights or weights[name].dim() != 2:
            raise DamagedError(f"it has no matrix {name} among its weights")
        sizes |= zip(axes, weights[name].shape, strict=True)
    for name, size in sizes.items():
        if (said := settings.get(name)) not in (size, None):
            raise DamagedError(
                f"it says that {name} is {str(said)[:20]}, but its weights are those of {name}={size}"
            )


def load_initial_weights(model: LanguageModel, path: str) -> None:
    """Let `model`, not yet sharded or compiled, begin from a checkpoint's weights, of the same architecture and shape.

    `path` may be a run folder too. If the attention mechanism differs, a line in the log names both. UserError if there
    is no checkpoint, it is damaged, anlit did not write it, or its weights do not fit the model.
    """
    given = f"initial_weights={path}"
    content = read_model(find_checkpoint(path))
    saved, expected = content["anlit"]["architecture"], type(model).__name__
    if saved.startswith("Folded"):
        what = "a folded model, which cannot be trained"
        raise UserError(
            f"{given} holds {what}: give the run's checkpoint, or export it without --fold"
        )
    if saved != expected:
        what = f"{saved}, but the configuration's model is {expected}"
        raise UserError(f"{given} holds {what}: set --model {saved} or choose another checkpoint")
    saved_weights, weights = content["state_dict"], model.state_dict()
    saved_settings, settings = content["hyper_parameters"], to_plain_values(dict(model.hparams))
    then, now = saved_settings.get("attention"), settings.get("attention")
    if _mechanisms(then) != _mechanisms(now):
        _log.info(
            f"attention is {attention_label(then)} in {given} and {attention_label(now)} in the model: what the "
            "mechanism itself learns starts from its initial values"
        )
        saved_weights, weights = (
            {
                name: value
                for name, value in held.items()
                if not any(part in name for part in OF_MECHANISM)
            }
            for held in (saved_weights, weights)
        )
    refuse_other_shapes(saved_weights, weights, given)
    refuse_non_finite(saved_weights, given)
    changed = dict(changes({"model": saved_settings}, {"model": settings}))
    others = [text for name, text in changed.items() if not name.startswith(SAID_OR_TAKEN)]
    if others:
        _log.info(
            f"{given} was trained with other settings, the new ones are used: {', '.join(others)}"
        )
    if model.model.tie_embeddings and not saved_weights[PREFIX + EMBEDDING].equal(
        saved_weights[PREFIX + HEAD]
    ):
        raise UserError(
            f"{given} has an embedding and a head that differ: leave out model.tie_embeddings"
        )
    model.model.begin_from(
        {name.removeprefix(PREFIX): value for name, value in saved_weights.items()}
    )
    model.family = content["anlit"].get("family")
    model.family_length = content["anlit"].get("family_length")


def _mechanisms(plain: Any) -> list[str]:
    """The classes in the settings of an attention mechanism, outer ones first."""
    if isinstance(plain, list):
        return [name for part in plain for name in _mechanisms(part)]
    if not isinstance(plain, dict):
        return []
    return [class_name(plain) or "Plain", *_mechanisms(list(init_args(plain).values()))]


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint in a record of what was measured."""
    return {
        "label": checkpoint.label,
        "file": str(checkpoint.file),
        "step": checkpoint.step,
        "seed": (checkpoint.config or {}).get("seed_everything"),
        "architecture": checkpoint.architecture,
        "parameters": checkpoint.model.model.n_parameters(),
        "training_length": checkpoint.training_length,
        "trained_on": checkpoint.trained_on,
    }


def device_name(device: torch.device) -> str:
    """The GPU's model, else the device's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
