"""Matrix products in float8, by torchao: x, W and the gradients are rounded to 8 bits right before each product.

Weights, activations, sums and tensors saved for the backward pass keep their precision. Numbers are scaled to float8's
range by their largest magnitude, with one factor per tensor or one per row (arXiv 2209.05433).
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from anlit.errors import UserError, install
from anlit.nn.layers.linear import ScaledLinear, computing_dtype

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""torchao's recipes: one scale per tensor; one per row; one per row, with the weights' gradients not in float8."""

CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
"""The lowest compute capability of a CUDA device that supports a recipe."""
MULTIPLE = 16
"""Every side of a matrix must be a multiple of this: the kernels need it."""


class Float8Product:
    """x Wᵀ in float8; replaces `torch.nn.functional.linear`.

    `emulated` rounds to float8 and multiplies in the wider type: the same rounding on any device, but slower. UserError
    if torchao is missing.
    """

    def __init__(self, recipe: Recipe, emulated: bool) -> None:
        try:
            from torchao.float8.config import Float8LinearConfig
            from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        except ImportError as error:
            fix = f"{install('float8', 'torchao')}, or leave float8 out"
            raise UserError(f"runtime.float8={recipe} needs torchao ({error}): {fix}") from error
        self.config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulated)
        with torch.device("meta"):  # only to derive the settings of the three products
            example = Float8Linear.from_float(
                nn.Linear(MULTIPLE, MULTIPLE, bias=False), self.config
            )
        self.products, self.multiply = example.linear_mm_config, matmul_with_hp_or_float8_args.apply

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (…, d_in), weight (d_out, d_in) → (…, d_out), in autocast's precision where that is on."""
        dtype = computing_dtype(x)
        return self.multiply(x.to(dtype), weight.to(dtype).mT, self.products, self.config)


def use_float8(module: nn.Module, recipe: Recipe, device_type: str) -> None:
    """Let all `ScaledLinear` in `module` multiply in float8, emulated on a CPU; UserError where that is impossible."""
    if device_type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < CAPABILITY[recipe]:
            needed = ".".join(map(str, CAPABILITY[recipe]))
            raise UserError(
                f"runtime.float8={recipe} needs a GPU of compute capability {needed}, and this one has "
                f"{capability[0]}.{capability[1]}: leave float8 out"
            )
    product = Float8Product(recipe, emulated=device_type != "cuda")
    for name, linear in module.named_modules():
        if isinstance(linear, ScaledLinear):
            if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
                raise UserError(
                    f"runtime.float8 needs matrices whose sides are multiples of {MULTIPLE}, and {name} is "
                    f"{linear.out_features} × {linear.in_features}: choose another d_model, d_ff or d_head, "
                    "or leave float8 out"
                )
            linear.product = product
