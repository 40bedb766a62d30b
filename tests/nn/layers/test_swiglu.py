"""SwiGLU by one product and by two, against the formula in float64."""

import pytest
import torch
from torch import Tensor, nn

from anlit.nn.layers.linear import ScaledLinear
from anlit.nn.layers.swiglu import separate_swiglu, swiglu


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("function", [swiglu, separate_swiglu])
def test_value_and_gradients_are_those_of_the_formula(function, has_scales: bool) -> None:
    torch.manual_seed(0)
    map_u = ScaledLinear(3, 5, factor=2.0)
    map_z = ScaledLinear(3, 5, factor=0.5)
    nn.init.normal_(map_u.weight)
    nn.init.normal_(map_z.weight)
    x = torch.randn(2, 4, 3, requires_grad=True)
    scales: list[Tensor | None] = [None, None]
    if has_scales:
        scales = [torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)]
    upstream = torch.randn(2, 4, 5)
    inputs = (
        [x, map_u.weight, map_z.weight, *scales] if has_scales else [x, map_u.weight, map_z.weight]
    )

    y = function(x, map_u, map_z, *scales)
    gradients = torch.autograd.grad(y, inputs, upstream)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    scale_u, scale_z = exact[3:] or (1.0, 1.0)
    u = 2 * (exact[0] @ exact[1].mT) * scale_u
    z = 0.5 * (exact[0] @ exact[2].mT) * scale_z
    expected = u * z / (1 + torch.exp(-z))
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    for gradient, exact_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-5)
