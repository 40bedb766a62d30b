"""Products in float8: the rounding written out, what of a model is rounded, what the rounding does to gradients."""

import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from anlit.errors import UserError
from anlit.nn.layers.float8 import Float8Product, use_float8
from anlit.nn.models.runtime import Runtime
from tests.nn.models.tiny import ARCHITECTURES, jolt, random_tokens, tiny

if sys.platform != "linux":  # the test extra has it there
    pytest.importorskip("torchao")


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """x, scaled so that the largest of a tensor (of each vector along `dim`: a power of two) just fits, and rounded."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.double()
    if dim is not None:
        scale = 2 ** scale.log2().floor()
    return (x.double() * scale).float().to(dtype).double() / scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_and_gradients_are_those_of_rounded_numbers(recipe: str) -> None:
    torch.manual_seed(0)
    x, weight, upstream = torch.randn(48, 32), torch.randn(64, 32), torch.randn(48, 64)
    own = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    y = Float8Product(recipe, emulated=True)(*own)
    y.backward(upstream)

    e4m3 = torch.float8_e4m3fn
    of_gradients = torch.float8_e5m2 if recipe == "tensorwise" else e4m3
    along, across = (None, None) if recipe == "tensorwise" else (1, 0)
    expected = rounded(x, e4m3, along) @ rounded(weight, e4m3, along).T
    dx = rounded(upstream, of_gradients, along) @ rounded(weight, e4m3, across)
    dweight = rounded(upstream, of_gradients, across).T @ rounded(x, e4m3, across)
    if recipe == "rowwise_with_gw_hp":
        dweight = upstream.double().T @ x.double()
    assert torch.linalg.vector_norm(expected - x.double() @ weight.double().T) > 0.01
    for ours, theirs in ((y, expected), (own[0].grad, dx), (own[1].grad, dweight)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_matrices_of_the_blocks_and_no_others(architecture, monkeypatch) -> None:
    """And what rounding does to the gradients is small beside them."""
    plain, rounding = (jolt(tiny(architecture)).model for _ in range(2))
    Runtime(float8="tensorwise").apply(rounding, "cpu")
    multiply, sides = Float8Product.__call__, []
    monkeypatch.setattr(
        Float8Product,
        "__call__",
        lambda self, x, w: sides.append(w.numel()) or multiply(self, x, w),
    )
    tokens, targets = random_tokens(4, 16), random_tokens(4, 16, seed=1)
    losses = [model(tokens, targets=targets)[1] for model in (plain, rounding)]
    for loss in losses:
        loss.backward()
    assert sum(sides) == 2 * (4 + 12) * 32 * 32
    assert (losses[0] - losses[1]).abs() > 1e-5, "nothing is rounded"
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)
    assert {parameter.dtype for parameter in rounding.parameters()} == {torch.float32}
    for name, parameter in plain.named_parameters():
        if parameter.dim() == 2:
            other = rounding.get_parameter(name).grad
            assert cosine_similarity(parameter.grad.flatten(), other.flatten(), dim=0) > 0.95, name


def test_refusals(monkeypatch) -> None:
    with pytest.raises(
        UserError, match=r"multiples of 16, and 0\.W_q is 24 × 24: choose another d_model"
    ):
        Runtime(float8="rowwise").apply(tiny(ARCHITECTURES[0], d_model=24).model, "cpu")
    blocks = tiny(ARCHITECTURES[0]).model.blocks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    use_float8(blocks, "tensorwise", "cuda")
    with pytest.raises(
        UserError, match=r"float8=rowwise needs a GPU of .* capability 9\.0, and this GPU has 8\.9"
    ):
        use_float8(blocks, "rowwise", "cuda")
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)
    with pytest.raises(
        UserError, match=r"needs torchao .*: run `make extras EXTRAS=float8`, .* leave float8 out"
    ):
        use_float8(blocks, "tensorwise", "cpu")
