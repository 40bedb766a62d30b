"""Folding: for transformers, the matrices of nGPT and anGPT absorb the factors that multiply them.

Training keeps factors and matrices apart. The bound on the rows holds for the matrix alone. The
step size holds for the scaling vector alone. After training the product is enough:

    anGPT   W ← c·W for ν_qkv, ν_p, ν_uz, √d, ν_d ν_acf;  W_head ← s_z ∘ W_head
            h ← w_h ∘ h + W_o(…),  w_h = ν(α)(1−α),  W_o ← ν(α)α ∘ W_o, and W_d alike
    nGPT    W_u ← s_u ∘ W_u,  W_z ← √d s_v ∘ W_z,  W_head ← s_z ∘ W_head
            α ← |α|,  s_qk with its factor √D

where s ∘ W multiplies row i of W by s_i. Some factors cannot be folded. These are nGPT's norms, and
s_qk after the norm of q and k. If a post-norm follows W_o and W_d, ν(α)α is another.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anlit.nn.layers.linear import ScaledLinear
from anlit.nn.layers.norms import UnitNorm
from anlit.nn.layers.scaling import ScalingVector
from anlit.nn.models.angpt import AnGPTBlock
from anlit.nn.models.decoder import Decoder


class Stored(nn.Module):
    """Replaces a scaling vector: its value, (width,), or None if its matrix has absorbed it."""

    def __init__(self, vector: Tensor | None = None) -> None:
        super().__init__()
        self.vector = None if vector is None else nn.Parameter(vector)

    def forward(self) -> Tensor | None:
        return self.vector


class ResidualWeights(nn.Module):
    """Replaces anGPT's α: the weights of h and of the suggestion, each (d,).

    The weight of the suggestion is None if W_o or W_d has absorbed it.
    """

    def __init__(self, h_weight: Tensor, suggestion_weight: Tensor | None) -> None:
        super().__init__()
        self.h = nn.Parameter(h_weight)
        self.suggestion = None if suggestion_weight is None else nn.Parameter(suggestion_weight)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        return self.h, self.suggestion


class FoldedAnGPTBlock(AnGPTBlock):
    """anGPT's block with one elementwise multiplication an update: h ← w_h ∘ h + suggestion."""

    def interpolate(self, h: Tensor, suggestion: Tensor, alpha: Any) -> Tensor:
        """w_h ∘ h + w_s ∘ suggestion.

        `alpha` is (w_h, w_s), with w_s None if W_o or W_d has absorbed it.
        """
        h_weight, suggestion_weight = alpha
        if suggestion_weight is not None:
            suggestion = suggestion_weight * suggestion
        return torch.addcmul(suggestion, h_weight, h)


@torch.no_grad()
def fold(decoder: Decoder) -> Decoder:
    """Return a copy of an nGPT or anGPT with the same logits and its factors in its matrices."""
    folded: Any = copy.deepcopy(decoder)
    for module in folded.modules():
        if isinstance(module, ScaledLinear):
            module.weight.mul_(module.factor)
            module.factor = 1.0
    folded.head.scale_rows(folded.s_z())
    folded.s_z = Stored()
    for block in folded.blocks:
        if isinstance(block, AnGPTBlock):
            _fold_angpt_block(block)
        else:
            _fold_ngpt_block(block)
        if isinstance(block.s_qk, ScalingVector):
            block.s_qk = Stored(block.s_qk())
    return folded


def _fold_angpt_block(block: Any) -> None:
    block.alpha_A = _fold_residual(block, block.alpha_A, block.W_o)
    block.alpha_M = _fold_residual(block, block.alpha_M, block.W_d)
    block.__class__ = FoldedAnGPTBlock


def _fold_residual(block: Any, alpha: nn.Module, linear: ScaledLinear) -> ResidualWeights:
    """The weights that replace `alpha`.

    `linear` absorbs the suggestion's, unless a norm follows it.
    """
    h_weight, suggestion_weight = block.residual_weights(alpha())
    if not isinstance(block.post_norm, nn.Identity):
        return ResidualWeights(h_weight, suggestion_weight)
    linear.scale_rows(suggestion_weight)
    return ResidualWeights(h_weight, None)


def _fold_ngpt_block(block: Any) -> None:
    block.W_u.scale_rows(block.s_u())
    block.W_z.scale_rows(block.s_v())
    block.s_u = Stored()
    block.s_v = Stored()
    block.alpha_A = Stored(block.alpha_A().abs())
    block.alpha_M = Stored(block.alpha_M().abs())
    if block.s_qk is not None and isinstance(block.norm_qk, UnitNorm):
        block.s_qk = Stored(block.norm_qk.factor * block.s_qk())
        block.norm_qk = UnitNorm()
