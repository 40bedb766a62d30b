"""Linear maps with factors, one by one and fused, and scaling vectors."""

import pytest
import torch

from anlit.layers.linear import ScaledLinear, fused_linear
from anlit.layers.scaling import ScalingVector


@pytest.mark.parametrize("n_tokens", [3, 40], ids=["a product each", "one product"])
def test_joined_maps_are_the_maps_one_by_one(n_tokens) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = [ScaledLinear(6, d_out, factor).double() for d_out, factor in ((4, 1.0), (5, 2.5), (2, -1.0))]
    for linear in maps:
        torch.nn.init.normal_(linear.weight, generator=generator)
    scales = [None, torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True), None]
    x = torch.randn(n_tokens, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    parameters = [x, scales[1], *(linear.weight for linear in maps)]
    one_by_one = torch.cat([W(x, s) for W, s in zip(maps, scales, strict=True)], -1)
    results = [
        [y, *torch.autograd.grad(y.sin().sum(), parameters)]
        for y in (fused_linear(x, *maps, scales=scales), one_by_one)
    ]
    assert one_by_one.shape == (n_tokens, 11)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused_linear(x, *maps)[:, 4:9], 2.5 * x @ maps[1].weight.T)


@pytest.mark.parametrize(("init", "scale"), [(0.05, 0.03), (10.0, 1.0)])
def test_a_scaling_vector_starts_at_init_and_adam_moves_it_by_lr_times_init_over_scale(init, scale) -> None:
    vector, lr = ScalingVector(4, init, scale), 1e-3
    before = vector().detach()
    torch.testing.assert_close(before, torch.full((4,), init))
    (vector() * torch.tensor([3.0, -0.2, 50.0, -1.0])).sum().backward()
    torch.optim.Adam(vector.parameters(), lr=lr).step()
    signs = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    torch.testing.assert_close(vector().detach() - before, signs * lr * init / scale, rtol=1e-3, atol=0)
    vector.reset_parameters()
    assert torch.equal(vector().detach(), before)


def test_the_scale_of_a_scaling_vector_must_be_positive() -> None:
    with pytest.raises(ValueError, match="the scale of a scaling vector must be positive"):
        ScalingVector(3, 1.0, 0.0)
