"""Models with logits far from zero, written for transformers and read by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import GPT
from anlit.cli import main
from anlit.evaluation.generation import Request, Sampling, generate
from anlit.hub.export import write_huggingface
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import Checkpoint
from tests.nn.models.tiny import jolt, random_tokens, tiny

transformers = pytest.importorskip("transformers")

PROMPT = random_tokens(2, 12)
N_NEW = 6


def loud(architecture: Any, **changes: Any) -> LanguageModel:
    """A tiny model off its initial values, with logits far from zero."""
    large: dict[str, Any] = {"s_z_init": 8.0}
    if architecture is GPT:
        large = {"init_std": 0.2}
    return jolt(tiny(architecture, **{**large, **changes}))


def write(model: LanguageModel, folder: Path) -> Path:
    """Write a model for transformers into `folder`."""
    model.eval().requires_grad_(False)
    checkpoint = Checkpoint(model, folder / "best.ckpt", 1, None, None, {})
    write_huggingface(checkpoint, folder, None)
    return folder


def read(folder: Path, trust: bool, **options: Any) -> Any:
    """The model that transformers reads; `trust` runs code of the folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=trust, **options
    )


def export(source: Path, output: Path, *options: str) -> Path:
    """The folder that `anlit export` writes."""
    assert main(["export", str(source), f"--output={output}", *options]) == 0
    return output


def import_model(source: Path, output: Path, *options: str) -> Path:
    """The folder that `anlit import` writes."""
    assert main(["import", str(source), f"--output={output}", *options]) == 0
    return output


def export_to_transformers(source: Path, output: Path) -> Path:
    return export(source, output, "--format=huggingface")


def greedy(model: LanguageModel, prompt: list[int]) -> list[int]:
    """The prompt with its continuation by anlit."""
    requests = [Request(prompt)]
    (continuation,) = generate(model.model, requests, N_NEW, Sampling(temperature=0))
    return [*prompt, *continuation.tokens]


def pad_left(tokens: Tensor, n_padded: int) -> tuple[Tensor, Tensor]:
    """Two prompts, the second shorter and padded on the left, and their mask."""
    tokens = tokens.clone()
    mask = torch.ones_like(tokens)
    tokens[1, :n_padded] = 0
    mask[1, :n_padded] = 0
    return tokens, mask


def assert_the_same(model: LanguageModel, hub_model: Any, **options: Any) -> None:
    """The same logits, and the same tokens in a padded batch of prompts of two lengths."""
    n_padded = 5
    tokens, mask = pad_left(PROMPT, n_padded)
    with torch.no_grad():
        expected = model(PROMPT)
        logits = hub_model(PROMPT).logits
    assert expected.std() > 0.5, "logits near zero would agree whatever the network"
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert_continues_alike(model, hub_model, tokens, mask, **options)


def assert_continues_alike(
    model: LanguageModel, hub_model: Any, tokens: Tensor, mask: Tensor, **options: Any
) -> None:
    """The same tokens after a batch of two prompts, the second of them padded at the left."""
    n_padded = int((mask[1] == 0).sum())
    generated = hub_model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=N_NEW,
        do_sample=False,
        **options,
    )
    whole, short = generated.tolist()
    assert whole == greedy(model, tokens[0].tolist())
    assert short[n_padded:] == greedy(model, tokens[1, n_padded:].tolist())
