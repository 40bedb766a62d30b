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

from anlit.errors import UserError, install_advice
from anlit.nn.layers.linear import ScaledLinear, computing_dtype

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""torchao's recipes: a scale per tensor; a scale per row; a scale per row, with the weights'
gradients not in float8."""

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""The lowest compute capability of a CUDA device that supports a recipe."""

MULTIPLE = 16
"""Both sides of a matrix must be multiples of this: the kernels need it."""


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
            fix = f"{install_advice('float8', 'torchao')}, or leave float8 out"
            raise UserError(f"runtime.float8={recipe} needs torchao ({error}): {fix}") from error
        self.config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
        self.multiply = matmul_with_hp_or_float8_args.apply
        with torch.device("meta"):  # only to derive the settings of the three products
            linear = nn.Linear(MULTIPLE, MULTIPLE, bias=False)
            self.products = Float8Linear.from_float(linear, self.config).linear_mm_config

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (…, d_in), weight (d_out, d_in) → (…, d_out), in autocast's precision if it is on."""
        dtype = computing_dtype(x)
        return self.multiply(x.to(dtype), weight.to(dtype).mT, self.products, self.config)


def use_float8(module: nn.Module, recipe: Recipe, device_type: str) -> None:
    """Let all `ScaledLinear` in `module` multiply in float8, emulated on a CPU.

    Raises:
        UserError: The GPU has no float8, or the shape of a matrix does not fit.
    """
    if device_type == "cuda" and torch.cuda.is_available():
        _check_capability(recipe)
    product = Float8Product(recipe, emulated=device_type != "cuda")
    for name, linear in module.named_modules():
        if isinstance(linear, ScaledLinear):
            if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
                raise UserError(
                    f"runtime.float8 needs matrices with sides that are multiples of {MULTIPLE}, "
                    f"and {name} is {linear.out_features} × {linear.in_features}: "
                    "choose another d_model, d_ff or d_head, or leave float8 out"
                )
            linear.product = product


def _check_capability(recipe: Recipe) -> None:
    major, minor = torch.cuda.get_device_capability()
    lowest_major, lowest_minor = CAPABILITY[recipe]
    if (major, minor) < (lowest_major, lowest_minor):
        raise UserError(
            f"runtime.float8={recipe} needs a GPU of compute capability "
            f"{lowest_major}.{lowest_minor}, and this GPU has {major}.{minor}: leave float8 out"
        )
