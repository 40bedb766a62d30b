"""An exported model: a folder with weights, settings and, if known, the tokenizer.

FOLDER/model.safetensors    weights by the decoder's names, in shards if they are large;
                            a tied embedding and head are one matrix
FOLDER/config.json          architecture, constructor arguments, training step, data fingerprint,
                            version, family of transformers and its context length, token that
                            separates documents
FOLDER/tokenizer.json       the tokenizer of the training data

config.json is written last. Neither anlit nor transformers reads a folder without it. So a kill
leaves no incomplete model.

Keys of config.json may be added, not renamed. Users have such folders.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

import anlit
from anlit.checkpoints.location import SETTINGS
from anlit.checkpoints.weight_files import FLOAT32, WeightFormat, read_weights, write_weights
from anlit.io.read import read_json
from anlit.io.write import write_bytes, write_text

TOKENIZER = "tokenizer.json"
EMBEDDING = "embedding.weight"
HEAD = "head.weight"
PREFIX = "model."
"""Prefix of the decoder's weights in the LightningModule; the file leaves it out."""
ADVICE = "copy the folder again, or export the model again"
"""What a user does about damaged weights."""


def write_exported(
    content: dict[str, Any],
    settings: dict[str, Any],
    folder: Path,
    tokenizer: bytes | None,
    separators: dict[str, Any],
    weight_format: WeightFormat = FLOAT32,
) -> None:
    """Write the model of a checkpoint's `content`; each file is complete or absent.

    Args:
        content: A loaded checkpoint with `state_dict`, `global_step` and `anlit`, the origin of the
            model.
        settings: The model's constructor arguments as plain values.
        tokenizer: The content of tokenizer.json; None for no such file.
        separators: How the corpus separates documents, if known: `end_of_document`,
            `document_token_at`.
        weight_format: The dtype and size of the weights' files.

    Raises:
        UserError: As `write_weights`.
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
    write_folder(folder, weights, record, tokenizer, weight_format)


def write_folder(
    folder: Path,
    weights: dict[str, Tensor],
    record: dict[str, Any],
    tokenizer: bytes | None,
    weight_format: WeightFormat,
) -> None:
    """Write the weights, tokenizer.json and, last, config.json with `record`.

    A missing folder is made. Other files of the model must be there before. Raises UserError as
    `write_weights`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, weights, weight_format)
    if tokenizer is not None:
        write_bytes(folder / TOKENIZER, tokenizer)
    write_text(folder / SETTINGS, json.dumps(record, indent=2) + "\n")


def read_settings(folder: str | Path) -> dict[str, Any]:
    """The content of config.json. Raises ValueError if the file is damaged or foreign."""
    record = read_json(Path(folder) / SETTINGS, dict)
    if "anlit" not in record:
        raise ValueError(f"its {SETTINGS} is not from anlit export or anlit import")
    return record


def read_exported(folder: str | Path) -> dict[str, Any]:
    """The exported model in the form of a checkpoint without optimizer.

    If a file is missing or damaged, raises UserError or an error of
    `anlit.checkpoints.integrity.UNREADABLE`.
    """
    record = read_settings(folder)
    weights = read_weights(Path(folder), ADVICE)
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
