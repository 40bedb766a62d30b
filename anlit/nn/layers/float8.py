"""Matrix products in float8, by torchao.

x, W and the gradients are rounded to 8 bits right before each product.

Weights, activations, sums and tensors saved for the backward pass keep their precision. Numbers are
scaled to float8's range by their largest magnitude (arXiv 2209.05433). A tensor or a row has a
factor.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from anlit.errors import UserError
from anlit.nn.layers.linear import ScaledLinear, computing_dtype
from anlit.packages import install_advice, is_installed

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""torchao's recipes: a scale per tensor; a scale per row; a scale per row, with the weights'
gradients not in float8."""

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""The lowest compute capability of a CUDA device that supports a recipe."""

MULTIPLE = 16
"""Both sides of a matrix must be multiples of this: the kernels need it. Tokens too, because the
weights' gradient is a product over them, so they are padded."""


class Float8Product:
    """x Wᵀ in float8; replaces `torch.nn.functional.linear`.

    Args:
        recipe: torchao's recipe.
        emulated: Round to float8 and multiply in the wider type: the same rounding on any device,
            but slower.

    Raises:
        UserError: torchao is missing.
    """

    def __init__(self, recipe: Recipe, emulated: bool) -> None:
        try:
            from torchao.float8.config import Float8LinearConfig
            from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        except ImportError as error:
            raise _missing_torchao(recipe, error) from error
        self.config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
        self.multiply = matmul_with_hp_or_float8_args.apply
        with torch.device("meta"):  # only to derive the settings of the three products
            linear = nn.Linear(MULTIPLE, MULTIPLE, bias=False)
            self.products = Float8Linear.from_float(linear, self.config).linear_mm_config

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (…, d_in), weight (d_out, d_in) → (…, d_out), in autocast's precision if it is on.

        Any number of tokens will do: rows of zeros, up to a multiple of 16, change no scale and no
        gradient.
        """
        dtype = computing_dtype(x)
        rows = x.to(dtype).flatten(0, -2)
        n_missing = -len(rows) % MULTIPLE
        if n_missing:
            rows = pad(rows, (0, 0, 0, n_missing))
        products = self.multiply(rows, weight.to(dtype).mT, self.products, self.config)
        if n_missing:
            products = products[:-n_missing]
        return products.unflatten(0, x.shape[:-1])


def check_torchao(recipe: Recipe) -> None:
    """Raise UserError if torchao is not installed, without importing it."""
    if not is_installed("torchao"):
        raise _missing_torchao(recipe, "No module named 'torchao'")


def check_shapes(module: nn.Module) -> None:
    """Raise UserError if the matrix of a `ScaledLinear` in `module` does not fit."""
    for name, linear in module.named_modules():
        if not isinstance(linear, ScaledLinear):
            continue
        if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
            raise UserError(
                f"runtime.float8 needs matrices with sides that are multiples of {MULTIPLE}, "
                f"and {name} is {linear.out_features} × {linear.in_features}: "
                "choose another d_model, d_ff, d_head or number of heads, or leave float8 out"
            )


def use_float8(module: nn.Module, recipe: Recipe, device_type: str) -> None:
    """Let all `ScaledLinear` in `module` multiply in float8, emulated on a CPU.

    Raises:
        UserError: The GPU has no float8, or the shape of a matrix does not fit.
    """
    if device_type == "cuda" and torch.cuda.is_available():
        _check_capability(recipe)
    check_shapes(module)
    product = Float8Product(recipe, emulated=device_type != "cuda")
    for linear in module.modules():
        if isinstance(linear, ScaledLinear):
            linear.product = product


def _missing_torchao(recipe: Recipe, problem: object) -> UserError:
    fix = f"{install_advice('float8', 'torchao')}, or leave float8 out"
    return UserError(f"runtime.float8={recipe} needs torchao ({problem}): {fix}")


def _check_capability(recipe: Recipe) -> None:
    major, minor = torch.cuda.get_device_capability()
    lowest_major, lowest_minor = CAPABILITY[recipe]
    if (major, minor) < (lowest_major, lowest_minor):
        raise UserError(
            f"runtime.float8={recipe} needs a GPU of compute capability "
            f"{lowest_major}.{lowest_minor}, and this GPU has {major}.{minor}: leave float8 out"
        )
