"""What the three architectures share: shapes that fit, initial values, counted work, half precision."""

import math

import pytest
import torch

from anlit import GPT, NGPT, AdamW, AnGPT, Plain, ScaleInvariant
from anlit.layers.scaling import ScalingVector
from anlit.models.angpt import Approximation
from anlit.optim.optimizers import parameter_groups
from tests.layers.from_logits import next_token_loss
from tests.models.tiny import ARCHITECTURES, SIZE, random_tokens, tiny

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
    assert tiny(GPT, init_std=0.1).model.head.weight.std().item() == pytest.approx(0.1, rel=0.1)


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


def test_initial_values_and_scales_of_the_scaling_vectors() -> None:
    root = 1 / math.sqrt(64)
    usual = {"alpha_A": (0.05, root), "alpha_M": (0.05, root), "s_z": (1.0, root)}
    expected = {
        NGPT: {**usual, "s_qk": (1.0, root), "s_u": (1.0, 1.0), "s_v": (1.0, 1.0)},
        AnGPT: {**usual, "alpha_A": (1 / 5, root), "alpha_M": (1 / 5, root)},
    }
    for architecture, values in expected.items():
        model = tiny(architecture, d_model=64, n_layers=5).model
        vectors = {n.rsplit(".", 1)[-1]: m for n, m in model.named_modules() if isinstance(m, ScalingVector)}
        assert vectors.keys() == values.keys()
        for name, (init, scale) in values.items():
            torch.testing.assert_close(vectors[name]().detach(), torch.full_like(vectors[name].stored, init))
            torch.testing.assert_close(vectors[name].stored.detach(), torch.full_like(vectors[name].stored, scale))


@pytest.mark.parametrize(("d_model", "rate"), [(256, 1 / 256), (32, 0.016)])
@architectures
def test_what_is_null_follows_the_size(architecture, d_model: int, rate: float) -> None:
    """As in the shipped model/*.yaml."""
    nulls = {"init_std": None} if architecture is GPT else {"alpha_init": None, "s_z_init": None}
    model = tiny(architecture, d_model=d_model, n_layers=5, vocab_size=500, **nulls).model
    if architecture is GPT:
        expected = 0.04 if d_model == 256 else 0.05
        assert model.head.weight.std().item() == pytest.approx(expected, rel=0.05)
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
        results.append(
            {"logits": logits.detach().float(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
        )
    for name, exact in results[0].items():
        assert results[1][name].dtype == torch.float32
        error = (results[1][name] - exact).norm() / exact.norm()
        assert 1e-5 < error < (0.03 if name == "logits" else 0.1), name


@pytest.mark.parametrize("has_factor", [True, False])
def test_an_update_of_angpt_is_the_interpolation_with_or_without_its_factor(has_factor: bool) -> None:
    block = tiny(AnGPT, approximation=Approximation(residual_factor=has_factor)).model.blocks[0]
    h, suggestion, alpha = torch.randn(3, 4, SIZE["d_model"], generator=torch.Generator().manual_seed(0))
    factor = (alpha**2 + (1 - alpha) ** 2).rsqrt() if has_factor else 1.0
    torch.testing.assert_close(block.interpolate(h, suggestion, alpha), factor * (h + alpha * (suggestion - h)))


@pytest.mark.parametrize("error", [0.02, -0.1])
def test_every_constant_factor_is_off_by_the_error_and_nothing_else(error: float) -> None:
    right, wrong = tiny(AnGPT), tiny(AnGPT, approximation=Approximation(error=error))
    for name in ("W_q", "W_k", "W_v", "W_o", "W_u", "W_z", "W_d"):
        exact, off = (getattr(model.model.blocks[0], name).factor for model in (right, wrong))
        assert off == pytest.approx((1 + error) ** (2 if name == "W_d" else 1) * exact), name  # ν_d and ν_acf
    assert all(map(torch.equal, right.state_dict().values(), wrong.state_dict().values()))
    with pytest.raises(ValueError, match="must be above -1"):
        Approximation(error=-1.0)
