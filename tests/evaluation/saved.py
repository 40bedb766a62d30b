"""A run folder with a small model in it, made without the command line's seconds of imports."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer

from anlit import ScaleInvariant, TokenShards
from anlit.data.preparation.sources import file_sha256
from anlit.data.tokenizer import train_bpe
from anlit.evaluation.data import load_validation_data
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import Checkpoint, load_checkpoint
from tests.data.prepared import VOCABULARY, random_tokens, write_prepared
from tests.nn.models.tiny import fit, jolt, tiny

LENGTH = 16
MECHANISM = {"class_path": "anlit.nn.mechanisms.scale_invariant.ScaleInvariant"}
VAL_TOKENS = 64 * 16 + 5
TEXTS = [
    "the cat sat on the mat and the dog sat by the cat",
    "naïve café – ☕ for the cats and the dogs",
] * 3
"""Texts to train a tokenizer on."""


def prepare(folder: Path, n_val: int = VAL_TOKENS, seed: int = 0, **changes: Any) -> Path:
    """A prepared folder of random tokens."""
    streams = {"train": random_tokens(500, seed + 1), "val": random_tokens(n_val, seed)}
    write_prepared(folder, streams, **{"tokenizer_sha256": "7" * 64, **changes})
    return folder


def small(architecture: Any, seed: int = 1, **changes: Any) -> LanguageModel:
    """A tiny scale-invariant model off its initial values."""
    settings = {"attention": ScaleInvariant(), "n_layers": 1, **changes}
    return jolt(tiny(architecture, seed, **settings), seed)


def save(model: LanguageModel, file: Path, **record: Any) -> Path:
    """Write a checkpoint as a training does; `record` replaces entries of its record."""
    fit(model, max_steps=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    model.trainer.save_checkpoint(file)
    if record:
        content = torch.load(file, weights_only=True)
        content["anlit"] |= record
        torch.save(content, file)
    return file


def make_run(
    folder: Path, data: Path, architecture: Any, seed: int = 1, name: str = "best", **changes: Any
) -> Path:
    """Write a run folder: checkpoint, config.yaml and run.json. `changes` are the model's."""
    settings = {"vocab_size": VOCABULARY, "context_length": LENGTH, **changes}
    model = small(architecture, seed, **settings)
    manifest = json.loads((data / "manifest.json").read_text())
    fingerprint = {"path": str(data)}
    for key in ("tokenizer_sha256", "content_sha256", "end_of_document", "document_token_at"):
        fingerprint[key] = manifest[key]
    save(model, folder / "checkpoints" / f"{name}.ckpt", data=fingerprint)
    config = _configuration(folder, data, architecture, seed, changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"data": fingerprint, "status": "finished"}))
    return folder


def _configuration(
    folder: Path, data: Path, architecture: Any, seed: int, changes: dict[str, Any]
) -> dict[str, Any]:
    """config.yaml; changes that are objects are left out."""
    model: dict[str, Any] = {"context_length": LENGTH, "attention": MECHANISM}
    for key, value in changes.items():
        if isinstance(value, int | float | str):
            model[key] = value
    class_path = f"{architecture.__module__}.{architecture.__name__}"
    data_settings = {"path": str(data), "batch_size": 4}
    return {
        "seed_everything": seed,
        "run_dir": str(folder),
        "model": {"class_path": class_path, "init_args": model},
        "data": {"class_path": "anlit.TokenShards", "init_args": data_settings},
    }


def load_with_data(run: Path) -> tuple[Checkpoint, TokenShards]:
    """The best checkpoint of a run, and its validation split."""
    checkpoint = load_checkpoint(str(run), "cpu")
    return checkpoint, load_validation_data(checkpoint)


def make_run_with_text(
    folder: Path, architecture: Any, tokenizer: Tokenizer | None = None, **changes: Any
) -> Path:
    """A run in FOLDER/run on data in FOLDER/data with a tokenizer.

    The default tokenizer has a few tokens less than the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_file = folder / "tokenizer.json"
    (tokenizer or train_bpe(TEXTS, VOCABULARY - 10)).save(str(tokenizer_file))
    data = prepare(folder / "data", tokenizer_sha256=file_sha256(tokenizer_file))
    tokenizer_file.rename(data / "tokenizer.json")
    return make_run(folder / "run", data, architecture, **changes)
