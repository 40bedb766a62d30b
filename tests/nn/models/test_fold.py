"""Folded models: the same logits, fewer multiplications."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anlit import NGPT, AnGPT, NoPE
from anlit.evaluation.generation import Request, Sampling, generate
from anlit.nn.models.fold import fold
from tests.nn.models.tiny import jolt, random_tokens, tiny

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
