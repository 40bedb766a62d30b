"""`--initial_weights`: a new run begins from the weights of a checkpoint."""

import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX
from anlit.checkpoints.location import find_checkpoint, run_of
from anlit.checkpoints.weights import (
    refuse_non_finite,
    refuse_other_architecture,
    refuse_other_shapes,
)
from anlit.config.labels import CONFIG, attention_label, class_name, init_args
from anlit.config.objects import recorded_name, to_plain_values
from anlit.config.schema import setting_of
from anlit.errors import UserError
from anlit.runs.folders import Run, read_settings_of_run
from anlit.runs.groups import learned_settings
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import read_model
from anlit.training.resume_checks import compare_settings

MECHANISM_WEIGHTS = (".attention.mechanism.", ".shared_coefficients.")
"""In the names of the weights that an attention mechanism learns."""
WITHOUT_LINE = ("model.attention", "model.optimizer")
"""Prefixes of fixed settings that may change without a line; the mechanism has a separate line."""
_log = logging.getLogger(__name__)


def load_initial_weights(model: LanguageModel, path: str) -> None:
    """Let `model` begin from the weights of a checkpoint of the same architecture and shape.

    The model is not sharded or compiled yet. If the attention mechanism differs, a line in the log
    names both.

    Args:
        path: A checkpoint, an exported model or a run folder.

    Raises:
        UserError: The checkpoint is missing, damaged or foreign, or its weights do not fit.
    """
    source = f"initial_weights={path}"
    file = find_checkpoint(path)
    content = read_model(file)
    architecture = content["anlit"]["architecture"]
    refuse_other_architecture(architecture, recorded_name(type(model)), source)
    weights = content["state_dict"]
    expected = model.state_dict()
    saved_settings = content["hyper_parameters"]
    settings = to_plain_values(dict(model.hparams))
    saved_attention = saved_settings.get("attention")
    attention = settings.get("attention")
    if _mechanisms(saved_attention) != _mechanisms(attention):
        _log.info(
            f"attention is {attention_label(saved_attention)} in {source} and "
            f"{attention_label(attention)} in the model: the mechanism's weights start from their "
            "initial values"
        )
        weights = _without_mechanism(weights)
        expected = _without_mechanism(expected)
    _refuse_other_vocabulary(weights, model.vocab_size, source)
    refuse_other_shapes(weights, expected, source)
    refuse_non_finite(weights, source)
    _log_changes(saved_settings, settings, source)
    if model.model.tie_embeddings:
        _refuse_untied(weights, source)
    decoder_weights = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
    model.model.begin_from(decoder_weights)
    model.family = content["anlit"].get("family")
    model.family_length = content["anlit"].get("family_length")
    model.initial_data = content["anlit"].get("data")
    model.begun_from = identity_of(file, weights)


def identity_of(file: Path, weights: dict[str, Tensor]) -> str:
    """Twelve hexadecimal digits by which `anlit compare` tells first weights apart.

    They are equal for the checkpoints of the same name in runs that differ only in their seeds.
    A checkpoint outside of a run folder is known by its weights.

    Args:
        file: The checkpoint or exported model.
        weights: Its weights, of any shape and dtype.
    """
    digest = sha256()
    run_dir = run_of(file)
    if run_dir is not None and (run_dir / CONFIG).exists():
        run = Run(run_dir, *read_settings_of_run(run_dir))
        origin = [file.name, learned_settings(run)]
        digest.update(json.dumps(origin, sort_keys=True, default=str).encode())
    else:
        for name, weight in sorted(weights.items()):
            digest.update(name.encode())
            digest.update(
                weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()[:12]


def _refuse_other_vocabulary(weights: dict[str, Tensor], vocab_size: int, source: str) -> None:
    """Raise UserError if the embedding has not `vocab_size` rows."""
    embedding = weights.get(PREFIX + EMBEDDING)
    if embedding is not None and len(embedding) != vocab_size:
        raise UserError(
            f"{source} has a vocabulary of {len(embedding)} tokens and the model {vocab_size}: "
            "prepare the data with its tokenizer, --tokenizer RUN/tokenizer.json, or set "
            f"--model.vocab_size {len(embedding)}"
        )


def _refuse_untied(weights: dict[str, Tensor], source: str) -> None:
    """Raise UserError if the head is not the embedding."""
    if not weights[PREFIX + EMBEDDING].equal(weights[PREFIX + HEAD]):
        raise UserError(
            f"{source} has an embedding and a head that differ: leave out model.tie_embeddings"
        )


def _log_changes(saved: dict[str, Any], current: dict[str, Any], source: str) -> None:
    """Log the settings of the model that differ from the checkpoint's."""
    changes = []
    for name, change in compare_settings({"model": saved}, {"model": current}):
        if setting_of(name).fixed and not name.startswith(WITHOUT_LINE):
            changes.append(change)
    if changes:
        _log.info(
            f"{source} was trained with other settings, the new ones are used: {', '.join(changes)}"
        )


def _without_mechanism(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights except the weights of attention mechanisms."""
    shared_weights = {}
    for name, weight in weights.items():
        if not any(mark in name for mark in MECHANISM_WEIGHTS):
            shared_weights[name] = weight
    return shared_weights


def _mechanisms(setting: Any) -> list[str]:
    """The classes in the settings of an attention mechanism, outer classes first."""
    if isinstance(setting, dict):
        arguments = list(init_args(setting).values())
        return [class_name(setting) or "Plain", *_mechanisms(arguments)]
    names = []
    if isinstance(setting, list):
        for entry in setting:
            names += _mechanisms(entry)
    return names
