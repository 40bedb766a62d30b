"""Loads the model of a checkpoint, without running any code that the file names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A checkpoint may name any class of these. A class that is not imported is refused.
import anlit.nn.mechanisms
import anlit.training.models  # noqa: F401
from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.exported import EMBEDDING, PREFIX
from anlit.checkpoints.integrity import MODEL, UNREADABLE, DamagedError, reason, require_content
from anlit.checkpoints.location import find_checkpoint, run_of
from anlit.checkpoints.weights import refuse_non_finite
from anlit.config.labels import CONFIG, architecture_label, attention_label, mapping
from anlit.config.objects import build_from_plain, recorded_name, subclass_named
from anlit.errors import UserError
from anlit.io.read import check_content, read_yaml
from anlit.nn.models.runtime import allow_compiled_kernels, prepare_cpu, without_values
from anlit.training.devices import check_device_type
from anlit.training.language_model import LanguageModel

BLOCKS = "model.blocks."
"""How the names of a block's weights begin."""
MLP = "model.blocks.0.W_u.weight"
"""The weight from which the width of the MLP is read."""
RECORD = {
    "data": {"tokenizer_sha256": str, "vocab_size": int, "class": str},
    "family": str,
    "family_length": int,
    "begun_from": str,
}
"""The types of the entries in a checkpoint's `anlit`, as a schema of `anlit.io.read`."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model and its origin."""

    model: LanguageModel
    """In eval mode, in float32, on the requested device."""
    file: Path
    step: int
    """The number of optimizer steps after which the file was written."""
    config: dict[str, Any] | None
    """The run's config.yaml; None if the file is not in a run folder."""
    trained_on: dict[str, Any] | None
    """`TokenShards.fingerprint` of the training data; None for a file without it."""
    settings: dict[str, Any]
    """The model's constructor arguments as plain values, without the optimizer."""
    family: str | None = None
    """transformers' model_type of the model that the first weights were imported from."""
    family_length: int | None = None
    """The context length of that model."""

    @property
    def architecture(self) -> str:
        """The model's class: GPT, NGPT, AnGPT, or the dotted path of a class from elsewhere."""
        return recorded_name(type(self.model))

    @property
    def label(self) -> str:
        """Architecture and attention mechanism, such as `anGPT, scale-invariant`."""
        attention = attention_label(self.settings.get("attention"))
        return f"{architecture_label(self.architecture)}, {attention}"

    @property
    def training_length(self) -> int:
        """Tokens in a training sequence."""
        return self.model.context_length

    @property
    def longest_context(self) -> int:
        """Tokens in the longest training sequence, in anlit or before the import."""
        return max(self.training_length, self.family_length or 0)

    @property
    def is_trained_here(self) -> bool:
        """Whether anlit trained the model; an imported model's settings do not tell its data."""
        return self.family is None or self.trained_on is not None

    @property
    def run(self) -> Path | None:
        """The run folder of the file; None if the file lies elsewhere."""
        return run_of(self.file) if self.config is not None else None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load_checkpoint(path: str, device: str = "auto", **changes: Any) -> Checkpoint:
    """Load the model of a .ckpt file, or of a run folder's best checkpoint, else its last.

    Args:
        device: A torch device, or auto for the GPU, else the CPU.
        changes: Constructor arguments to replace, such as kernel="eager".

    Raises:
        UserError: The checkpoint is missing, damaged or foreign, or the device cannot be used.
    """
    target = find_device(device)
    if target.type == "cpu":
        prepare_cpu()
    file = find_checkpoint(path)
    content = read_model(file)
    record = content["anlit"]
    settings = {}
    for name, value in content["hyper_parameters"].items():
        if not name.startswith("_") and name != "optimizer":
            settings[name] = value
    with _explain_unreadable(file):
        model = rebuild(content, settings | changes, file).to(target)
    model.eval().requires_grad_(False)
    refuse_non_finite(model.state_dict(), str(file))
    # A tool that reads many tokens allows compiled kernels itself.
    allow_compiled_kernels(model.model, 0, model.context_length)
    return Checkpoint(
        model=model,
        file=file,
        step=content["global_step"],
        config=_config_of_run(file),
        trained_on=record.get("data"),
        settings=settings,
        family=record.get("family"),
        family_length=record.get("family_length"),
    )


def _config_of_run(file: Path) -> dict[str, Any] | None:
    """The config.yaml of the run folder that has the checkpoint `file`; None outside of a run."""
    run = run_of(file)
    if run is None or not (run / CONFIG).exists():
        return None
    return mapping(read_yaml(run / CONFIG, advice="correct it, or copy the checkpoint elsewhere"))


def find_device(name: str) -> torch.device:
    """The device `name`; auto is the GPU, else the CPU. Raises UserError if it cannot be used."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        check_device_type("--device", torch.device(name).type)
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise UserError(
            f"--device {name} cannot be used here: choose auto, cpu, or a device of this machine"
        ) from error


@contextmanager
def _explain_unreadable(file: Path) -> Iterator[None]:
    """Turn the errors of a damaged or foreign checkpoint into a UserError."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"{file} cannot be read as a checkpoint ({reason(error)}): choose another one from a "
            "run folder"
        ) from error


def read_model(file: Path) -> dict[str, Any]:
    """The content of a checkpoint, checked to have everything that its model needs.

    Raises UserError if the file is damaged or foreign.
    """
    with _explain_unreadable(file):
        content = read_checkpoint(file)
        require_content(content, MODEL | {"state_dict": dict})
        check_content(content, {"anlit": RECORD})
        if not all(isinstance(weight, Tensor) for weight in content["state_dict"].values()):
            raise DamagedError("not all of state_dict are tensors")
        _refuse_oversized_claim(content["state_dict"])
        return content


def rebuild(content: dict[str, Any], settings: dict[str, Any], file: Path) -> LanguageModel:
    """The model with its weights, in float32 on torch's default device.

    Raises UserError if a class may not be built. Raises ValueError if settings and weights do not
    fit.
    """
    architecture = subclass_named(
        LanguageModel, content["anlit"]["architecture"], f"{file}: architecture"
    )
    weights = content["state_dict"]
    _refuse_other_sizes(settings, weights, architecture)
    with without_values():
        model = build_from_plain(architecture, settings, f"{file}: model")
    has_weights_only = all(map(_is_known_class, model.model.modules()))
    if not has_weights_only:  # a class of the user's may make tensors that are no weights
        model = build_from_plain(architecture, settings, f"{file}: model")
        model.configure_model()
    for name, weight in model.state_dict().items():
        if name in weights and weights[name].is_floating_point() != weight.is_floating_point():
            raise DamagedError(f"it has {weights[name].dtype} for the weights {name}")
    if has_weights_only:
        wide_weights = {name: _to_float32(weight) for name, weight in weights.items()}
        model.load_state_dict(wide_weights, assign=True)
        model.model.complete()
    else:
        model.load_state_dict(weights)
    return model


def draw_anew(checkpoint: Checkpoint, seed: int) -> None:
    """Give the model of a checkpoint the initial values of a new model of its settings.

    The constructor draws them. It also sets parameters of a user's modules that have no
    `reset_parameters`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = type(checkpoint.model)
        new_model = build_from_plain(kind, checkpoint.settings, f"{checkpoint.file}: model")
        new_model.configure_model()
    checkpoint.model.load_state_dict(new_model.state_dict())


def _is_known_class(module: Any) -> bool:
    """Whether the module is of anlit or torch. It then has no tensors but its weights."""
    return type(module).__module__.startswith(("anlit.", "torch."))


def _to_float32(weight: Tensor) -> Tensor:
    return weight.float() if weight.is_floating_point() else weight


def _refuse_oversized_claim(weights: dict[str, Tensor]) -> None:
    """Refuse views of a small tensor that claim a large shape."""
    bytes_by_storage = {}
    for tensor in weights.values():
        storage = tensor.untyped_storage()
        bytes_by_storage[storage.data_ptr()] = storage.nbytes()
    held = sum(bytes_by_storage.values())
    claimed = sum(tensor.nbytes for tensor in weights.values())
    if claimed > 2 * held:  # two layers may share a weight
        raise DamagedError(f"it claims {claimed:,} bytes of weights and holds {held:,}")


def _refuse_other_sizes(
    settings: dict[str, Any], weights: dict[str, Tensor], architecture: type
) -> None:
    """Refuse settings that differ from the sizes of the weights, before such a model is built."""
    layers = {name.split(".")[2] for name in weights if name.startswith(BLOCKS)}
    sizes = {"n_layers": len(layers)}
    matrices = {PREFIX + EMBEDDING: ("vocab_size", "d_model")}
    # The architectures of users may have another MLP.
    has_anlit_mlp = bool(layers) and architecture.__module__.startswith("anlit.")
    if MLP in weights or has_anlit_mlp:
        matrices[MLP] = ("d_ff", "d_model")
    for name, axes in matrices.items():
        if name not in weights or weights[name].dim() != 2:
            raise DamagedError(f"it has no matrix {name} among its weights")
        sizes |= zip(axes, weights[name].shape, strict=True)
    for name, size in sizes.items():
        setting = settings.get(name)
        if setting is not None and setting != size:
            raise DamagedError(
                f"its settings have {name}={str(setting)[:20]}, but its weights have {name}={size}"
            )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint in a record of measurements."""
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
    """The GPU's model, or the kind of a device that is not a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
