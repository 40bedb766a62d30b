"""Products in float8: the rounding written out, the rounded matrices, the gradients' error."""

import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from anlit.errors import UserError
from anlit.nn.layers.float8 import Float8Product, use_float8
from anlit.nn.models.runtime import Runtime
from tests.nn.models.tiny import ARCHITECTURES, jolt, prepare_to_train, random_tokens, tiny

if sys.platform != "linux":  # the test extra has it there
    pytest.importorskip("torchao")


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """x rounded, after it is scaled so that the largest number just fits.

    With `dim` the vectors along it are scaled, by powers of two.
    """
    wide = x.double()
    largest_number = torch.finfo(dtype).max
    if dim is None:
        scale = largest_number / wide.abs().amax()
    else:
        scale = largest_number / wide.abs().amax(dim, keepdim=True)
        scale = 2 ** scale.log2().floor()
    narrow = (wide * scale).float().to(dtype)
    return narrow.double() / scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_and_gradients_are_computed_from_rounded_numbers(recipe: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 32, requires_grad=True)
    weight = torch.randn(64, 32, requires_grad=True)
    upstream = torch.randn(48, 64)

    y = Float8Product(recipe, emulated=True)(x, weight)
    y.backward(upstream)

    exact_x = x.detach()
    exact_weight = weight.detach()
    e4m3 = torch.float8_e4m3fn
    dtype_of_gradients = torch.float8_e5m2 if recipe == "tensorwise" else e4m3
    along, across = (None, None) if recipe == "tensorwise" else (1, 0)
    expected = rounded(exact_x, e4m3, along) @ rounded(exact_weight, e4m3, along).T
    dx = rounded(upstream, dtype_of_gradients, along) @ rounded(exact_weight, e4m3, across)
    dweight = rounded(upstream, dtype_of_gradients, across).T @ rounded(exact_x, e4m3, across)
    if recipe == "rowwise_with_gw_hp":
        dweight = upstream.double().T @ exact_x.double()
    unrounded = exact_x.double() @ exact_weight.double().T
    assert torch.linalg.vector_norm(expected - unrounded) > 0.01
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), dx, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), dweight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_matrices_of_the_blocks_alone_are_rounded(architecture, monkeypatch) -> None:
    """The error of the gradients is small."""
    exact = jolt(tiny(architecture)).model
    rounding = jolt(tiny(architecture)).model
    prepare_to_train(rounding, Runtime(float8="tensorwise"), "cpu")
    sizes: list[int] = []
    multiply = Float8Product.__call__

    def multiply_and_record(self: Float8Product, x: Tensor, weight: Tensor) -> Tensor:
        sizes.append(weight.numel())
        return multiply(self, x, weight)

    monkeypatch.setattr(Float8Product, "__call__", multiply_and_record)
    tokens = random_tokens(4, 16)
    targets = random_tokens(4, 16, seed=1)

    exact_loss = exact(tokens, targets=targets)[1]
    exact_loss.backward()
    loss = rounding(tokens, targets=targets)[1]
    loss.backward()

    assert sum(sizes) == 2 * (4 + 12) * 32 * 32
    assert (loss - exact_loss).abs() > 1e-5, "nothing is rounded"
    torch.testing.assert_close(exact_loss, loss, rtol=0.02, atol=0)
    assert {parameter.dtype for parameter in rounding.parameters()} == {torch.float32}
    for name, parameter in exact.named_parameters():
        if parameter.dim() == 2:
            gradient = rounding.get_parameter(name).grad
            similarity = cosine_similarity(parameter.grad.flatten(), gradient.flatten(), dim=0)
            assert similarity > 0.95, name


def test_refusals(monkeypatch) -> None:
    narrow = tiny(ARCHITECTURES[0], d_model=24)
    with pytest.raises(
        UserError, match=r"multiples of 16, and 0\.W_q is 24 × 24: choose another d_model"
    ):
        prepare_to_train(narrow.model, Runtime(float8="rowwise"), "cpu")
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
