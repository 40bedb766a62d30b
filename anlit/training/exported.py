"""An exported model: a folder with its weights as one safetensors file, its settings, and its tokenizer if known.

FOLDER/model.safetensors    weights by the names of the decoder, float32
FOLDER/config.json          architecture, constructor arguments, training step, data fingerprint, version
FOLDER/tokenizer.json       of the data that it was trained on
"""

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import anlit

WEIGHTS, SETTINGS, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
PREFIX = "model."
"""Of the decoder inside the LightningModule; the file leaves it out."""


def is_exported(path: str | Path) -> bool:
    """Whether `path` is a folder that `write_exported` made."""
    return (Path(path) / WEIGHTS).is_file() and (Path(path) / SETTINGS).is_file()


def write_exported(content: dict[str, Any], settings: dict[str, Any], folder: Path, tokenizer: bytes | None) -> None:
    """Write the model of a checkpoint; each file is complete or absent.

    Args:
        content: The checkpoint.
        settings: The model's constructor arguments as plain values.
        folder: Made where missing.
        tokenizer: What tokenizer.json is to hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name.removeprefix(PREFIX): tensor.contiguous() for name, tensor in content["state_dict"].items()}
    record = {
        "anlit": anlit.__version__,
        "architecture": content["anlit"]["architecture"],
        "step": content["global_step"],
        "data": content["anlit"]["data"],
        "settings": settings,
    }
    partial = folder / f".{WEIGHTS}.partial"
    save_file(weights, partial, metadata={"format": "pt", "architecture": record["architecture"]})
    os.replace(partial, folder / WEIGHTS)
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(tokenizer)
    partial = folder / f".{SETTINGS}.partial"
    partial.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(partial, folder / SETTINGS)


def read_exported(folder: str | Path) -> dict[str, Any]:
    """The exported model in the form of a checkpoint, without optimizer.

    Raises:
        ValueError: One of its files is damaged.
    """
    record = json.loads((Path(folder) / SETTINGS).read_text())
    try:
        weights = load_file(Path(folder) / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS}: {error}") from error
    return {
        "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
        "hyper_parameters": record["settings"],
        "pytorch-lightning_version": version("lightning"),  # whose form this is
        "global_step": record["step"],
        "anlit": {"architecture": record["architecture"], "version": record["anlit"], "data": record["data"]},
    }
