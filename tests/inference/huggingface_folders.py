"""A model written for transformers and read by it, without a training run or the hub."""

from pathlib import Path
from typing import Any

import pytest

from anlit import GPT
from anlit.checkpoints.loading import Checkpoint
from anlit.inference.export import write_huggingface
from anlit.models.language_model import LanguageModel
from tests.models.tiny import jolt, tiny

transformers = pytest.importorskip("transformers")


def loud(architecture: Any, **changes: Any) -> LanguageModel:
    """A tiny model off its initial values whose logits are not near zero."""
    large = {"init_std": 0.2} if architecture is GPT else {"s_z_init": 8.0}
    return jolt(tiny(architecture, **{**large, **changes}))


def write(model: LanguageModel, folder: Path) -> Path:
    checkpoint = Checkpoint(model.eval().requires_grad_(False), folder / "best.ckpt", 1, None, None, {})
    write_huggingface(checkpoint, folder, None)
    return folder


def read(folder: Path, trust: bool) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
