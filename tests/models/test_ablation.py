"""The settings that the ablation turns: anGPT without ν(α), and with factors that are off."""

import pytest
import torch

from anlit import AnGPT
from anlit.models.angpt import Approximation
from tests.models.tiny import SIZE, random_tokens, tiny


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
    exact, off = right.model.blocks[0], wrong.model.blocks[0]
    for name in ("W_q", "W_k", "W_v", "W_o", "W_u", "W_z"):
        assert getattr(off, name).factor == pytest.approx((1 + error) * getattr(exact, name).factor), name
    assert off.W_d.factor == pytest.approx((1 + error) ** 2 * exact.W_d.factor)  # ν_d and ν_acf
    assert all(map(torch.equal, right.state_dict().values(), wrong.state_dict().values()))
    tokens = random_tokens(2, 16)
    assert not torch.allclose(right(tokens), wrong(tokens))


def test_factors_that_vanish_are_refused() -> None:
    with pytest.raises(ValueError, match="must be above -1"):
        Approximation(error=-1.0)
