"""From a run folder or a checkpoint file to the model in it."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.integrity import UNREADABLE, unreadable
from anlit.checkpoints.location import CHECKPOINTS, find_checkpoint
from anlit.checkpoints.rebuild import rebuild, settings_of
from anlit.configuration import ARCHITECTURES, CONFIG, attention_label
from anlit.errors import UserError
from anlit.models.kernel_selection import use_saved
from anlit.models.language_model import LanguageModel
from anlit.models.runtime import flush_denormals, keep_freed_memory
from anlit.reading import read_yaml


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model and its origin."""

    model: LanguageModel
    """In eval mode, float32, on the requested device."""
    file: Path
    step: int
    """Number of optimizer steps after which it was written."""
    config: dict[str, Any] | None
    """The run's config.yaml; None if the file is not in a run folder."""
    trained_on: dict[str, Any] | None
    """Fingerprint of the training data, as `TokenShards.fingerprint`; None if it is not known."""
    settings: dict[str, Any]
    """The model's constructor arguments as plain values, without those for training."""
    family: str | None = None
    """transformers' model_type of the checkpoint that its first weights were imported from."""

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
        changes: Constructor arguments to replace, such as backend="eager".

    Raises:
        UserError: There is no checkpoint, it is damaged or anlit did not write it, or the device cannot be used.
    """
    target = find_device(device)
    if target.type == "cpu":
        keep_freed_memory()
        flush_denormals()
    file = find_checkpoint(path)
    content = read_model(file)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is an instance of `nn.Module`.*")
            model = rebuild(content, file, changes)
    except UserError:
        raise
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    model = model.to(target).eval().requires_grad_(False)
    config, record = _run_config(file), content["anlit"]
    model.selections = use_saved(model.model, record.get("attention"), target)
    return Checkpoint(
        model, file, content["global_step"], config, record.get("data"), settings_of(content), record.get("family")
    )


def find_device(name: str) -> torch.device:
    """The device `name`; auto is the GPU if there is one.

    Raises:
        UserError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch without CUDA
        raise UserError(f"--device {name} cannot be used here: choose auto, cpu, or a device that is there") from error
    return device


def read_model(file: Path) -> dict[str, Any]:
    """The content of a checkpoint that has all that a model needs.

    Raises:
        UserError: It is damaged, or anlit did not write it.
    """
    try:
        content = read_checkpoint(file)
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    if not isinstance(content, dict) or not isinstance(content.get("anlit"), dict):
        raise UserError(f"{file} is a checkpoint that anlit did not write: choose one from a run folder")
    if wrong := [name for name, is_right in _parts(content) if not is_right]:
        raise UserError(f"{file} is damaged (without {', '.join(wrong)}): choose another checkpoint")
    return content


def _parts(content: dict[str, Any]) -> list[tuple[str, bool]]:
    """The parts that every checkpoint has, each with whether this one has it."""
    record, weights = content["anlit"], content.get("state_dict")
    data = record.get("data")
    hashes = data.get("tokenizer_sha256") if isinstance(data, dict) else None
    return [
        ("hyper_parameters", isinstance(content.get("hyper_parameters"), dict)),
        ("state_dict", isinstance(weights, dict) and all(isinstance(weight, Tensor) for weight in weights.values())),
        ("global_step", isinstance(content.get("global_step"), int)),
        ("architecture", isinstance(record.get("architecture"), str)),
        ("data", isinstance(data, dict | None) and isinstance(hashes, str | None)),
        ("family", isinstance(record.get("family"), str | None)),
    ]


def _run_config(file: Path) -> dict[str, Any] | None:
    """The content of the run folder's config.yaml; None if there is none."""
    path = file.parent.parent / CONFIG
    if file.parent.name != CHECKPOINTS or not path.exists():
        return None
    config = read_yaml(path, advice="correct it, or copy the checkpoint elsewhere")
    return config if isinstance(config, dict) else None


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """One checkpoint in a record."""
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
