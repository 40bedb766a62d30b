"""Folded models: the same logits, fewer multiplications, no training."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anlit import GPT, NGPT, AnGPT, NoPE
from anlit.cli import main
from anlit.errors import UserError
from anlit.evaluation.generation import Request, Sampling, generate
from anlit.nn.models.fold import fold
from anlit.training.initial_weights import load_initial_weights
from anlit.training.load_model import load_checkpoint
from anlit.training.models import FoldedAnGPT, FoldedNGPT
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run, prepare
from tests.nn.models.tiny import fit, jolt, random_tokens, tiny

MULTIPLICATIONS = {
    "mul",
    "mul_",
    "div",
    "div_",
    "addcmul",
    "addcdiv",
    "lerp",
    "square",
    "pow",
    "baddbmm",
}


@torch.no_grad()
def multiplications(decoder: torch.nn.Module) -> Counter[str]:
    """How often each elementwise multiplication or division of tensors runs."""
    counts = Counter[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts.update({str(function).split(".")[1]} & MULTIPLICATIONS)
            return function(*args, **(kwargs or {}))

    with Counting():
        decoder(random_tokens(2, 16))
    return counts


# anGPT multiplies u ∘ SiLU(z), α, and x · 1/rms(x) of q and k with its square.
# nGPT multiplies u ∘ SiLU(z), s_qk ∘ q and ∘ k, and α. It divides by norms of q, of k, and twice in
# each update.
@pytest.mark.parametrize(
    ("architecture", "qk_norm", "per_layer"),
    [
        (AnGPT, False, {"mul": 1, "addcmul": 2}),
        (AnGPT, True, {"mul": 1 + 2, "addcmul": 2, "pow": 2}),
        (NGPT, True, {"mul": 3, "lerp": 2, "div": 6}),
    ],
)
def test_a_folded_model_multiplies_by_what_cannot_be_folded_alone(
    architecture, qk_norm, per_layer
) -> None:
    model = tiny(architecture, positions=NoPE(), qk_norm=qk_norm)
    decoder = jolt(model).model.eval()
    expected = {}
    for name, number in per_layer.items():
        expected[name] = number * len(decoder.blocks)

    unfolded = multiplications(decoder)
    folded = multiplications(fold(decoder))

    ratio = 2 if architecture is AnGPT else 1
    assert folded == expected
    assert unfolded.total() > ratio * folded.total()


@pytest.mark.parametrize("architecture", [NGPT, AnGPT])
def test_a_folded_model_generates_the_same_with_a_cache(architecture) -> None:
    decoder = jolt(tiny(architecture)).double().model.eval()
    requests = [Request([5, 6, 7]), Request([8])]

    texts = generate(decoder, requests, 24, Sampling(seed=4))
    texts_of_folded = generate(fold(decoder), requests, 24, Sampling(seed=4))

    assert [text.tokens for text in texts] == [text.tokens for text in texts_of_folded]


@pytest.mark.parametrize(
    ("architecture", "label"),
    [
        (NGPT, "nGPT (folded)"),
        (AnGPT, "anGPT (folded)"),
    ],
)
def test_a_folded_export_loads_everywhere_but_for_training(
    architecture, label, tmp_path: Path, refusal
) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), architecture)
    out = tmp_path / "out"

    assert main(["export", str(run), "--fold", "--output", str(out)]) == 0

    tokens = random_tokens(2, 12, vocab_size=VOCABULARY)
    original = load_checkpoint(str(run), "cpu")
    loaded = load_checkpoint(str(out), "cpu")
    assert loaded.label.startswith(label)
    expected = original.model(tokens)
    torch.testing.assert_close(loaded.model(tokens), expected, rtol=1e-5, atol=1e-5)
    assert "folded already" in refusal("export", out, "--fold", "--output", tmp_path / "again")
    with pytest.raises(UserError, match="holds a folded model, which cannot be trained"):
        load_initial_weights(original.model, str(out))


def test_training_a_folded_model_and_folding_gpt_are_refused() -> None:
    for architecture in (FoldedNGPT, FoldedAnGPT):
        with pytest.raises(UserError, match="a folded model cannot be trained"):
            fit(tiny(architecture), max_steps=1)
    with pytest.raises(UserError, match=r"GPT\+ has no factors"):
        fold(tiny(GPT).model)
