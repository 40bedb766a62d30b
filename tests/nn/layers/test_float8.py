"""Products in float8: the rounding written out, the rounded matrices, the gradients' error."""

import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from anlit import GPT
from anlit.errors import UserError
from anlit.nn.layers import float8
from anlit.nn.layers.float8 import Float8Product, use_float8
from anlit.nn.models.runtime import Runtime
from tests.nn.models.tiny import (
    architectures,
    jolt,
    prepare_to_train,
    random_tokens,
    tiny,
)

if sys.platform != "linux":  # the test extra has it there
    pytest.importorskip("torchao")

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """x rounded, after it is scaled so that the largest number just fits.

    `dim` scales each vector along it by a power of two.
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_and_gradients_are_computed_from_rounded_numbers(recipe: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 32, requires_grad=True)
    weight = torch.randn(64, 32, requires_grad=True)
    upstream = torch.randn(48, 64)

    y = Float8Product(recipe, emulated=True)(x, weight)
    y.backward(upstream)

    e4m3 = torch.float8_e4m3fn
    dtype_of_gradients = torch.float8_e5m2 if recipe == "tensorwise" else e4m3
    along, across = (None, None) if recipe == "tensorwise" else (1, 0)
    exact_x = x.detach()  # (tokens, d_in)
    exact_weight = weight.detach()  # (d_out, d_in)

    y_x = rounded(exact_x, e4m3, along)
    y_weight = rounded(exact_weight, e4m3, along)
    expected_y = y_x @ y_weight.T
    unrounded_y = exact_x.double() @ exact_weight.double().T
    assert (expected_y - unrounded_y).norm() > 0.01
    torch.testing.assert_close(y.double(), expected_y, rtol=1e-4, atol=1e-4)

    dx_upstream = rounded(upstream, dtype_of_gradients, along)
    dx_weight = rounded(exact_weight, e4m3, across)
    expected_dx = dx_upstream @ dx_weight
    torch.testing.assert_close(x.grad.double(), expected_dx, rtol=1e-4, atol=1e-4)

    dweight_upstream = rounded(upstream, dtype_of_gradients, across)
    dweight_x = rounded(exact_x, e4m3, across)
    if recipe == "rowwise_with_gw_hp":
        dweight_upstream = upstream.double()
        dweight_x = exact_x.double()
    expected_dweight = dweight_upstream.T @ dweight_x
    torch.testing.assert_close(weight.grad.double(), expected_dweight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 8), (1, 1000)], ids=str)
def test_any_number_of_tokens_will_do(shape: tuple[int, int], recipe: str) -> None:
    """The result and the gradients are those without padding, which the emulation does not need."""
    torch.manual_seed(0)
    n_tokens = shape[0] * shape[1]
    x = torch.randn(*shape, 32, requires_grad=True)
    weight = torch.randn(64, 32, requires_grad=True)
    upstream = torch.randn(*shape, 64)
    product = Float8Product(recipe, emulated=True)

    y = product(x, weight)
    gradients = torch.autograd.grad(y, (x, weight), upstream)

    flat_x = x.detach().view(n_tokens, 32)
    multiply = product.multiply
    expected = multiply(flat_x.requires_grad_(), weight.mT, product.products, product.config)
    expected_gradients = torch.autograd.grad(
        expected, (flat_x, weight), upstream.view(n_tokens, 64)
    )
    assert y.shape == (*shape, 64)
    torch.testing.assert_close(y.view(n_tokens, 64), expected)
    torch.testing.assert_close(gradients[0].view(n_tokens, 32), expected_gradients[0])
    torch.testing.assert_close(gradients[1], expected_gradients[1])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 8), (1, 1000)], ids=str)
def test_pytorchs_kernel_on_a_gpu_accepts_any_number_of_tokens(
    shape: tuple[int, int], recipe: str, monkeypatch
) -> None:
    """Its checks of shapes need no GPU: tensors without numbers reach them, not autocast."""
    monkeypatch.setattr(float8, "computing_dtype", lambda x: x.dtype)
    product = Float8Product(recipe, emulated=False)
    options = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    x = torch.empty(*shape, 32, **options)
    weight = torch.empty(64, 32, **options)

    y = product(x, weight)
    y.sum().backward()

    assert y.shape == (*shape, 64)
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


@architectures
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

    _, exact_loss = exact(tokens, targets=targets)
    exact_loss.backward()
    _, loss = rounding(tokens, targets=targets)
    loss.backward()

    n_of_a_block = (4 + 12) * 32 * 32
    assert sum(sizes) == 2 * n_of_a_block
    assert (loss - exact_loss).abs() > 1e-5, "nothing is rounded"
    torch.testing.assert_close(exact_loss, loss, rtol=0.02, atol=0)
    assert {parameter.dtype for parameter in rounding.parameters()} == {torch.float32}
    for name, parameter in exact.named_parameters():
        if parameter.dim() == 2:
            exact_gradient = parameter.grad.flatten()
            gradient = rounding.get_parameter(name).grad.flatten()
            assert cosine_similarity(gradient, exact_gradient, dim=0) > 0.95, name


def test_a_width_that_is_no_multiple_of_16_is_refused() -> None:
    decoder = tiny(GPT, d_model=24).model

    message = r"multiples of 16, and 0\.W_q is 24 × 24: choose another d_model"
    with pytest.raises(UserError, match=message):
        prepare_to_train(decoder, Runtime(float8="rowwise"), "cpu")


def test_a_gpu_without_the_products_is_refused(monkeypatch) -> None:
    blocks = tiny(GPT).model.blocks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))

    use_float8(blocks, "tensorwise", "cuda")
    message = r"float8=rowwise needs a GPU of .* capability 9\.0, and this GPU has 8\.9"
    with pytest.raises(UserError, match=message):
        use_float8(blocks, "rowwise", "cuda")


def test_a_missing_torchao_is_named_with_its_command(monkeypatch) -> None:
    blocks = tiny(GPT).model.blocks
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)

    message = r"needs torchao .*: run `make extras EXTRAS=float8`, .* leave float8 out"
    with pytest.raises(UserError, match=message):
        use_float8(blocks, "tensorwise", "cpu")
