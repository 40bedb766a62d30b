"""Folding: for inference, the factors of nGPT and anGPT are stored in the matrices that they multiply.

Training keeps factors and matrices apart, because the bound on the matrix's rows and the step size of a scaling vector
apply to each of them. After training the product is enough:

    anGPT   W ← c·W for ν_qkv, ν_p, ν_uz, √d, ν_d ν_acf;  W_head ← s_z ∘ W_head
            h ← w_h ∘ h + W_o(…),  w_h = ν(α)(1−α),  W_o ← ν(α)α ∘ W_o, and W_d alike
    nGPT    W_u ← s_u ∘ W_u,  W_z ← √d s_v ∘ W_z,  W_head ← s_z ∘ W_head,  |α| and s_qk as they multiply

where s ∘ W multiplies row i of W by s_i. Some factors cannot be folded: nGPT's norms, s_qk after the norm of q and k,
and ν(α)α if a post-norm follows W_o and W_d.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anlit.errors import UserError
from anlit.nn.layers.linear import ScaledLinear
from anlit.nn.layers.norms import UnitNorm
from anlit.nn.layers.scaling import ScalingVector
from anlit.nn.models.angpt import AnGPTBlock
from anlit.nn.models.decoder import Decoder, NormalisedDecoder


class Stored(nn.Module):
    """Replaces a scaling vector: returns its value, (width,), or None if its matrix has absorbed it."""

    def __init__(self, vector: Tensor | None = None) -> None:
        super().__init__()
        self.vector = None if vector is None else nn.Parameter(vector)

    def forward(self) -> Tensor | None:
        return self.vector


class ResidualWeights(nn.Module):
    """Replaces anGPT's α: the weights of h and of the suggestion, each (d,); the latter is None if it is folded."""

    def __init__(self, h: Tensor, suggestion: Tensor | None) -> None:
        super().__init__()
        self.h = nn.Parameter(h)
        self.suggestion = nn.Parameter(suggestion) if suggestion is not None else None

    def forward(self) -> tuple[Tensor, Tensor | None]:
        return self.h, self.suggestion


class FoldedAnGPTBlock(AnGPTBlock):
    """anGPT's block with one elementwise multiplication an update: h ← w_h ∘ h + suggestion."""

    def interpolate(self, h: Tensor, suggestion: Tensor, alpha: Any) -> Tensor:
        """w_h ∘ h + w_s ∘ suggestion; `alpha` holds both weights; w_s is None if W_o or W_d has absorbed it."""
        weight_of_h, weight_of_suggestion = alpha
        if weight_of_suggestion is not None:
            suggestion = weight_of_suggestion * suggestion
        return torch.addcmul(suggestion, weight_of_h, h)


@torch.no_grad()
def fold(decoder: Decoder) -> Decoder:
    """A copy of `decoder` with the same logits, whose factors are in its matrices as far as possible.

    UserError if the decoder has no factors (GPT+), or is folded already.
    """
    if not isinstance(decoder, NormalisedDecoder):
        raise UserError(
            "--fold is for nGPT and anGPT, whose factors go into their matrices; GPT+ has none: leave it out"
        )
    if isinstance(decoder.s_z, Stored):
        raise UserError("the model is folded already: leave out --fold")
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
    for name, linear in (("alpha_A", block.W_o), ("alpha_M", block.W_d)):
        weight_of_h, weight_of_suggestion = block.residual_weights(getattr(block, name)())
        if isinstance(block.post_norm, nn.Identity):
            linear.scale_rows(weight_of_suggestion)
            weight_of_suggestion = None
        setattr(block, name, ResidualWeights(weight_of_h, weight_of_suggestion))
    block.__class__ = FoldedAnGPTBlock


def _fold_ngpt_block(block: Any) -> None:
    block.W_u.scale_rows(block.s_u())
    block.W_z.scale_rows(block.s_v())
    block.s_u, block.s_v = Stored(), Stored()
    block.alpha_A, block.alpha_M = Stored(block.alpha_A().abs()), Stored(block.alpha_M().abs())
    if block.s_qk is not None and isinstance(block.norm_qk, UnitNorm):
        block.s_qk, block.norm_qk = Stored(block.norm_qk.factor * block.s_qk()), UnitNorm()
