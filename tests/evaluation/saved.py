"""A run folder with a small model in it, made without the command line's seconds of imports."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from anlit import ScaleInvariant
from anlit.training.language_model import LanguageModel
from tests.data.prepared import VOCABULARY, random_tokens, write_prepared
from tests.nn.models.tiny import fit, jolt, tiny

LENGTH = 16
MECHANISM = {"class_path": "anlit.nn.mechanisms.scale_invariant.ScaleInvariant"}
VAL_TOKENS = 64 * 16 + 5


def prepare(folder: Path, n_val: int = VAL_TOKENS, seed: int = 0, **changes: Any) -> Path:
    """A prepared folder of random tokens."""
    streams = {"train": random_tokens(500, seed + 1), "val": random_tokens(n_val, seed)}
    write_prepared(folder, streams, **{"tokenizer_sha256": "7" * 64, **changes})
    return folder


def small(architecture: Any, seed: int = 1, **changes: Any) -> LanguageModel:
    """A tiny scale-invariant model off its initial values."""
    return jolt(
        tiny(architecture, seed, **{"attention": ScaleInvariant(), "n_layers": 1, **changes}), seed
    )


def save(model: LanguageModel, file: Path, **record: Any) -> Path:
    """A checkpoint as a training writes it; `record` replaces parts of what it says about itself."""
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
    """A run folder: checkpoint, config.yaml and run.json. `changes` are the model's."""
    model = small(
        architecture, seed, **{"vocab_size": VOCABULARY, "context_length": LENGTH, **changes}
    )
    manifest = json.loads((data / "manifest.json").read_text())
    keys = ("tokenizer_sha256", "content_sha256", "end_of_document", "document_token_at")
    fingerprint = {"path": str(data), **{key: manifest[key] for key in keys}}
    save(model, folder / "checkpoints" / f"{name}.ckpt", data=fingerprint)
    settings = {
        key: value for key, value in changes.items() if isinstance(value, int | float | str)
    }
    kind = f"{architecture.__module__}.{architecture.__name__}"
    config = {
        "seed_everything": seed, "run_dir": str(folder),
        "model": {"class_path": kind, "init_args": {"context_length": LENGTH, "attention": MECHANISM, **settings}},
        "data": {"class_path": "anlit.TokenShards", "init_args": {"path": str(data), "batch_size": 4}},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"data": fingerprint, "status": "finished"}))
    return folder
