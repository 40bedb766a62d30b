"""An exported model: a folder with weights, settings and, if known, the tokenizer.

FOLDER/model.safetensors    weights by the decoder's names; a tied embedding and head are one matrix
FOLDER/config.json          architecture, constructor arguments, training step, data fingerprint,
                            version, family of transformers and its context length, token that
                            separates documents
FOLDER/tokenizer.json       the tokenizer of the training data

Keys of config.json may be added, not renamed. Users have such folders.
"""

import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import anlit
from anlit.checkpoints.location import SETTINGS, WEIGHTS
from anlit.checkpoints.weights import refuse_non_finite
from anlit.errors import UserError
from anlit.io.read import read_json
from anlit.io.write import replacing, write_text

TOKENIZER = "tokenizer.json"
EMBEDDING = "embedding.weight"
HEAD = "head.weight"
PREFIX = "model."
"""Prefix of the decoder's weights in the LightningModule; the file leaves it out."""


def write_exported(
    content: dict[str, Any],
    settings: dict[str, Any],
    folder: Path,
    tokenizer: bytes | None,
    separators: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the model of a checkpoint's `content`; each file is complete or absent.

    Args:
        content: A loaded checkpoint with `state_dict`, `global_step` and `anlit`, the origin of the
            model.
        settings: The model's constructor arguments as plain values.
        tokenizer: The content of tokenizer.json; None for no such file.
        separators: How the corpus separates documents, if known: `end_of_document`,
            `document_token_at`.
        dtype: The dtype of the weights in the file.
    """
    origin = content["anlit"]
    record = {
        "anlit": anlit.__version__,
        "architecture": origin["architecture"],
        "step": content["global_step"],
        "data": origin["data"],
        "family": origin.get("family"),
        "family_length": origin.get("family_length"),
        "end_of_document": separators.get("end_of_document"),
        "document_token_at": separators.get("document_token_at"),
        "settings": settings,
    }
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in content["state_dict"].items()}
    if settings.get("tie_embeddings"):  # one matrix with two names
        del weights[HEAD]
    write_folder(folder, weights, record, tokenizer, dtype)


def write_folder(
    folder: Path,
    weights: dict[str, Tensor],
    record: dict[str, Any],
    tokenizer: bytes | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write model.safetensors in `dtype`, tokenizer.json and, last, config.json.

    Without config.json a folder is not an exported model. So a kill leaves no incomplete model. A
    missing folder is made. Raises UserError if a weight is NaN, infinite or too large for `dtype`.
    """
    refuse_non_finite(weights, "the model")
    folder.mkdir(parents=True, exist_ok=True)
    converted = {name: convert(name, tensor, dtype) for name, tensor in weights.items()}
    with replacing(folder / WEIGHTS) as partial:
        partial.touch()
        # A new file has the mode of the umask. safetensors would let only the owner read it.
        mode = partial.stat().st_mode
        save_file(converted, partial, metadata={"format": "pt"})
        partial.chmod(mode)
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(tokenizer)
    write_text(folder / SETTINGS, json.dumps(record, indent=2) + "\n")


def convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the file's dtype. Raises UserError if it is too large for this dtype."""
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.contiguous()
    converted = tensor.to(dtype).contiguous()
    largest = max(-tensor.min().item(), tensor.max().item())
    if math.isfinite(largest) and largest > torch.finfo(dtype).max:
        raise UserError(
            f"--dtype {str(dtype).removeprefix('torch.')} cannot hold {name}, which reaches "
            f"{largest:.3g}: choose bfloat16 or float32"
        )
    return converted


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The content of config.json. Raises ValueError if the file is damaged or foreign."""
    record = read_json(Path(folder) / SETTINGS, dict)
    if "anlit" not in record:
        raise ValueError(f"its {SETTINGS} is not from anlit export or anlit import")
    return record


def read_exported(folder: str | Path) -> dict[str, Any]:
    """The exported model in the form of a checkpoint without optimizer.

    If a file is missing or damaged, raises an error of `anlit.checkpoints.integrity.UNREADABLE`.
    """
    record = read_settings(folder)
    weights = load_file(Path(folder) / WEIGHTS)
    if record["settings"].get("tie_embeddings") and EMBEDDING in weights:
        weights[HEAD] = weights[EMBEDDING]
    return {
        "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
        "hyper_parameters": record["settings"],
        # Tells Lightning the form of this dictionary.
        "pytorch-lightning_version": version("lightning"),
        "global_step": record["step"],
        "anlit": {
            "architecture": record.get("architecture"),
            "data": record.get("data"),
            "family": record.get("family"),
            "family_length": record.get("family_length"),
            "version": record["anlit"],
        },
    }
