"""What the three architectures share: initial values, half precision."""

import math

import pytest
import torch

from anlit import GPT, NGPT, AdamW, AnGPT, Plain, ScaleInvariant
from anlit.layers.scaling import ScalingVector
from anlit.optim.optimizers import parameter_groups
from tests.layers.from_logits import next_token_loss
from tests.models.tiny import ARCHITECTURES, random_tokens, tiny

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def test_initial_values_of_gpt() -> None:
    n_layers = 8
    for name, parameter in tiny(GPT, n_layers=n_layers, d_model=64, vocab_size=500).model.named_parameters():
        if name.endswith("gain"):
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = name.endswith(("W_o.weight", "W_d.weight"))
        expected = 0.02 / math.sqrt(2 * n_layers) if residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert parameter.mean().abs().item() < 4 * expected / math.sqrt(parameter.numel())


@pytest.mark.parametrize("heads", [{}, {"n_heads": 4, "n_kv_heads": 2, "d_head": 24}], ids=["alike", "shared keys"])
@pytest.mark.parametrize("architecture", [NGPT, AnGPT])
def test_initial_vectors_point_anywhere_and_have_norm_one(architecture, heads) -> None:
    """Norms along the embedding for nGPT (columns of W_o and W_d), along the input for anGPT."""
    for name, parameter in tiny(architecture, d_model=64, vocab_size=300, **heads).model.named_parameters():
        if name.endswith("weight"):
            columns = architecture is NGPT and name.endswith(("W_o.weight", "W_d.weight"))
            vectors = parameter.detach().double().movedim(0 if columns else 1, -1)
            assert (vectors.norm(dim=-1) - 1).abs().max() < 1e-6, name
            assert vectors.mean().abs() < 4 / math.sqrt(vectors.numel() * vectors.shape[-1])
            fourth_moment = (vectors * math.sqrt(vectors.shape[-1])).pow(4).mean().item()
            assert fourth_moment == pytest.approx(3, rel=0.15), f"{name}: not Gaussian directions"


ROOT = 1 / math.sqrt(64)
USUAL = {"alpha_A": (0.05, ROOT), "alpha_M": (0.05, ROOT), "s_z": (1.0, ROOT)}


@pytest.mark.parametrize(("architecture", "expected"), [
    (NGPT, {**USUAL, "s_qk": (1.0, ROOT), "s_u": (1.0, 1.0), "s_v": (1.0, 1.0)}),
    (AnGPT, {**USUAL, "alpha_A": (1 / 5, ROOT), "alpha_M": (1 / 5, ROOT)}),
])  # fmt: skip
def test_initial_values_and_scales_of_the_scaling_vectors(architecture, expected) -> None:
    modules = tiny(architecture, d_model=64, n_layers=5).model.named_modules()
    vectors = {name.rsplit(".", 1)[-1]: module for name, module in modules if isinstance(module, ScalingVector)}
    assert vectors.keys() == expected.keys()
    for name, (init, scale) in expected.items():
        for value, number in ((vectors[name](), init), (vectors[name].stored, scale)):
            torch.testing.assert_close(value.detach(), torch.full_like(value, number))


@pytest.mark.parametrize(("d_model", "rate", "std"), [(256, 1 / 256, 0.04), (32, 0.016, 0.05)])
@architectures
def test_what_is_null_follows_the_size(architecture, d_model: int, rate: float, std: float) -> None:
    """As in the shipped model/*.yaml."""
    nulls = {"init_std": None} if architecture is GPT else {"alpha_init": None, "s_z_init": None}
    model = tiny(architecture, d_model=d_model, n_layers=5, vocab_size=500, **nulls).model
    if architecture is GPT:
        assert model.head.weight.std().item() == pytest.approx(std, rel=0.05)
    else:
        assert (model.blocks[0].alpha_A.init, model.s_z.init) == (1 / 5, math.sqrt(d_model))
    groups = AdamW(parameter_groups(model), lr=None).param_groups
    assert [group["lr"] for group in groups] == [rate] * len(groups)


@architectures
@pytest.mark.parametrize("mechanism", [Plain(), ScaleInvariant()], ids=["plain", "scale-invariant"])
def test_bfloat16_stays_close_to_float32(architecture, mechanism) -> None:
    model = tiny(architecture, attention=mechanism, d_model=64).model
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=1)
    ids = (torch.arange(16) > 9).long().expand(2, 16)
    results = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logits = model(tokens, ids)
            next_token_loss(logits, targets)[0].backward()
        results.append({"logits": logits.float()} | {name: p.grad.clone() for name, p in model.named_parameters()})
    for name, exact in results[0].items():
        assert results[1][name].dtype == torch.float32
        error = (results[1][name] - exact).norm() / exact.norm()
        assert 1e-5 < error < (0.03 if name == "logits" else 0.1), name
