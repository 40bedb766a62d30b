"""Linear maps with factors, one by one and fused."""

import pytest
import torch

from anlit.layers.linear import ScaledLinear, fused_linear


@pytest.mark.parametrize("n_tokens", [3, 40], ids=["a product each", "one product"])
def test_joined_maps_are_the_maps_one_by_one(n_tokens) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = [ScaledLinear(6, d_out, factor).double() for d_out, factor in ((4, 1.0), (5, 2.5), (2, -1.0))]
    for linear in maps:
        torch.nn.init.normal_(linear.weight, generator=generator)
    scales = [None, torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True), None]
    x = torch.randn(n_tokens, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    parameters = [x, scales[1], *(linear.weight for linear in maps)]
    results = []
    for y in (
        fused_linear(x, *maps, scales=scales),
        torch.cat([W(x, s) for W, s in zip(maps, scales, strict=True)], -1),
    ):
        assert y.shape == (n_tokens, 11)
        results.append([y, *torch.autograd.grad(y.sin().sum(), parameters)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused_linear(x, *maps)[:, 4:9], 2.5 * x @ maps[1].weight.T)
