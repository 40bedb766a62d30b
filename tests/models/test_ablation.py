"""The settings that the ablation turns: anGPT without ν(α), with factors that are off, strict and bounded norms."""

import pytest
import torch

from anlit import NGPT, AnGPT
from anlit.models.angpt import Approximation
from anlit.models.fold import fold
from tests.models.tiny import CONSTANT, SIZE, adamw, fit, jolt, random_tokens, tiny

ABLATIONS = [Approximation(residual_factor=False), Approximation(error=0.1), Approximation(False, -0.02)]


def test_without_the_factor_an_update_is_the_plain_interpolation() -> None:
    block = tiny(AnGPT, approximation=Approximation(residual_factor=False)).model.blocks[0]
    h, suggestion, alpha = torch.randn(3, 4, SIZE["d_model"], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block.interpolate(h, suggestion, alpha), h + alpha * (suggestion - h))
    torch.testing.assert_close(
        tiny(AnGPT).model.blocks[0].interpolate(h, suggestion, alpha),
        (h + alpha * (suggestion - h)) / (alpha**2 + (1 - alpha) ** 2).sqrt(),
    )


@pytest.mark.parametrize("error", [0.02, -0.1])
def test_every_constant_factor_is_off_by_the_error_and_nothing_else(error: float) -> None:
    right, wrong = tiny(AnGPT), tiny(AnGPT, approximation=Approximation(error=error))
    one, two = right.model.blocks[0], wrong.model.blocks[0]
    for name in ("W_q", "W_k", "W_v", "W_o", "W_u", "W_z"):
        assert getattr(two, name).factor == pytest.approx((1 + error) * getattr(one, name).factor), name
    assert two.W_d.factor == pytest.approx((1 + error) ** 2 * one.W_d.factor)  # ν_d and ν_acf
    assert all(map(torch.equal, right.state_dict().values(), wrong.state_dict().values()))
    tokens = random_tokens(2, 16)
    assert not torch.allclose(right(tokens), wrong(tokens))


@pytest.mark.parametrize("approximation", ABLATIONS, ids=str)
@pytest.mark.parametrize("post_norm", [False, True])
def test_ablated_models_fold_to_the_same_logits(approximation: Approximation, post_norm: bool) -> None:
    model = jolt(tiny(AnGPT, approximation=approximation, post_norm=post_norm)).double()
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(fold(model.model)(tokens), model(tokens))


@pytest.mark.parametrize(("architecture", "axis"), [(AnGPT, 1), (NGPT, 0)])
def test_norms_are_strict_or_bounded_whatever_the_architecture(architecture: type, axis: int) -> None:
    for norms in ("strict", "bounded"):
        model = fit(tiny(architecture, norms=norms, optimizer=adamw(lr=0.05), schedule=CONSTANT), 10)
        found = torch.cat([rows.flatten() for rows in model.model.row_norms()])
        assert found.max() <= 1 + 1e-6
        assert (found.min() > 1 - 1e-5) == (norms == "strict")
        of_W_o = model.model.blocks[0].W_o.weight.norm(dim=axis)
        if norms == "strict":
            torch.testing.assert_close(of_W_o, torch.ones_like(of_W_o))


def test_gates_are_bounded_under_strict_norms() -> None:
    model = tiny(AnGPT, norms="strict", attention_gate="per_head")
    model.model.restore_norms()
    assert torch.isfinite(model(random_tokens(2, 16))).all()
    assert all(weight.norm() == 0 for name, weight in model.model.matrices() if name == "W_g")


def test_factors_that_vanish_are_refused() -> None:
    with pytest.raises(ValueError, match="must be above -1"):
        Approximation(error=-1.0)
