"""anGPT: the approximately normalised transformer (Franke et al., NeurIPS 2025, arXiv 2505.22014).

Constants that need no data replace the norm layers. For a high-dimensional unit x, ‖g(x)‖
concentrates at its mean. The rows of the weights are bounded by 1. ν = 1/√E‖g(x)‖², see
`anlit.nn.layers.norms`.

    h = E[token]
    q, k, v = ν_qkv W h;   q, k → rms (QK-norm) → RoPE      softmax scale 1/√D
    h_A = ν_p W_o · Attn(q, k, v)                           h ← ν(α_A) ∘ (h + α_A ∘ (h_A − h))
    u = ν_uz W_u h,  z = ν_uz W_z h
    h_M = ν_d W_d (ν_acf · u ∘ SiLU(√d z))                  h ← ν(α_M) ∘ (h + α_M ∘ (h_M − h))
    logits = s_z ∘ (W_head h)

The attention average has no factor. This is exact if attention is peaked. QK-norm is the only norm
layer. There is no weight decay and no warm-up.

Deviations: QK-norm has no gain, which is our reading of the paper. It comes before RoPE, where the
paper has it after: a rotation keeps norms. Two settings come from nGPT.
`s_qk` multiplies q and k after the QK-norm (q ∘ s_qk). `silu_std` replaces √(d/f) as the standard
deviation of √d z.

Shapes: B batch, T tokens, d model width, H heads of queries, G heads of keys and values.
D head width, f MLP width, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from anlit.nn.attention.qk_clip import shrink
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.linear import ScaledLinear, fused_linear
from anlit.nn.layers.norms import Norms, RMSNorm, UnitNorm, nu_activation, nu_linear, nu_residual
from anlit.nn.layers.positions import Rotation, rotate
from anlit.nn.layers.scaling import scale_queries_and_keys
from anlit.nn.layers.swiglu import swiglu
from anlit.nn.models.config import NormalisedConfig
from anlit.nn.models.decoder import NormalisedDecoder, heads_first, split_heads


@dataclass(frozen=True)
class Approximation:
    """Deviations of anGPT's factors from the paper, for ablations.

    Args:
        residual_factor: Multiply each update by ν(α). Without it the norm of h changes and training
            is less stable.
        error: Multiply every constant factor (ν_qkv, ν_p, ν_uz, ν_acf, ν_d) by 1 + error.
    """

    residual_factor: bool = True
    error: float = 0.0


@dataclass(frozen=True)
class AnGPTConfig(NormalisedConfig):
    """Settings of anGPT.

    Args:
        norm_eps: ε of the QK-norm, added to a mean square of about 1/d_head, where qk_norm_eps is
            not given.
        norms: Rows bounded by norm 1 after each step, or set to it (an ablation).
        approximation: Deviations of the factors, for ablations.
        s_qk: Multiply q and k by a learned vector after RoPE and QK-norm, as nGPT does. It has a
            number per head and dimension: init 1, scale 1/√d_model. The paper has none.
        silu_std: Standard deviation σ of SiLU's argument, for which ν_acf is computed. By default
            √(d_model/d_ff), the paper's. nGPT has 1.
    """

    default_alpha_sum: ClassVar[float] = 0.5
    """The first updates make suggestions point along h. If they also have the length that the
    constants are made for, attention is linear in the length r of its input and an MLP quadratic:
    dr/dt = r + r², where t is the sum of α so far. From r = 1 this has no bound at t = ln 2 = 0.69.
    With a sum of 1 the first steps of deep models can blow up (docs/results/architectures.md, anGPT
    at depth)."""
    norm_eps: float = 1e-6
    norms: Norms = "bounded"
    approximation: Approximation = Approximation()
    s_qk: bool = False
    silu_std: float | None = None


class AnGPTBlock(nn.Module):
    """h (B, T, d) of norm about 1 → the same, interpolated towards attention's and MLP's output."""

    def __init__(self, config: AnGPTConfig, layer: int) -> None:
        super().__init__()
        d = config.d_model
        f = config.mlp_width
        root_d = math.sqrt(d)
        self.n_heads = config.n_heads
        self.n_kv_heads = config.kv_heads
        self.d_head = config.head_width
        q_width = self.n_heads * self.d_head
        kv_width = self.n_kv_heads * self.d_head

        # H concatenated unit vectors have norm √H, also where heads share keys: ν_p = √(H·D/d)/√H
        scale = 1 + config.approximation.error
        silu_std = nu_linear(d, f) if config.silu_std is None else config.silu_std
        nu_qkv = scale * nu_linear(d, self.d_head)
        nu_p = scale * nu_linear(self.d_head, d)
        nu_uz = scale * nu_linear(d, f)
        nu_d = scale * nu_linear(f, d)
        self.nu_acf = scale * nu_activation(silu_std)
        """The factor that gives u ∘ SiLU(√d z) norm 1. W_d contains it."""
        self.has_residual_factor = config.approximation.residual_factor

        # Each constant is the factor of a map, also if it multiplies the map's input: scalars
        # commute with W. Without QK-norm q and k have norm about 1. The factor √D then gives them a
        # root mean square of about 1 (our choice).
        qk_factor = nu_qkv if config.qk_norm else math.sqrt(self.d_head) * nu_qkv
        self.W_q = ScaledLinear(d, q_width, qk_factor)
        self.W_k = ScaledLinear(d, kv_width, qk_factor)
        self.W_v = ScaledLinear(d, kv_width, nu_qkv)
        self.W_o = ScaledLinear(q_width, d, nu_p)
        self.W_u = ScaledLinear(d, f, nu_uz)
        self.W_z = ScaledLinear(d, f, root_d * scale * silu_std)
        self.W_d = ScaledLinear(f, d, nu_d * self.nu_acf)

        self.alpha_A = config.alpha()
        self.alpha_M = config.alpha()
        eps = config.norm_eps if config.qk_norm_eps is None else config.qk_norm_eps / self.d_head
        has_gain = config.qk_norm_gain is True
        self.norm_q = RMSNorm(self.d_head, eps, has_gain) if config.qk_norm else nn.Identity()
        self.norm_k = RMSNorm(self.d_head, eps, has_gain) if config.qk_norm else nn.Identity()
        self.s_qk = config.scaling(q_width, 1.0, None) if config.s_qk else None
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        self.output = config.attention_output(UnitNorm(), gate_factor=root_d)
        self.post_norm = UnitNorm() if config.post_norm else nn.Identity()
        self.positions = config.positions.for_layer(layer)
        self.attention = config.attention_of(layer, has_gain or config.s_qk or not config.qk_norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        """h (B, T, d) → (B, T, d), both of norm about 1 along d."""
        h = self.interpolate(h, self.attend(h, documents, rotation), self.alpha_A())
        return self.interpolate(h, self.mlp(h), self.alpha_M())

    def interpolate(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """ν(α) ∘ (h + α ∘ (suggestion − h)), (B, T, d), as two weights for h and the suggestion."""
        h_weight, suggestion_weight = self.residual_weights(alpha)
        return torch.addcmul(h_weight * h, suggestion_weight, self.dropout(suggestion))

    def residual_weights(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """ν(α)(1 − α) and ν(α)α, each (d,); without ν if `residual_factor` is off."""
        if not self.has_residual_factor:
            return 1 - alpha, alpha
        nu = nu_residual(alpha)
        return nu * (1 - alpha), nu * alpha

    def attend(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        """h_A, the suggestion for the first interpolation: h (B, T, d) → (B, T, d)."""
        # Project: q (B, T, H, D); k, v (B, T, G, D)
        qkv = fused_linear(h, self.W_q, self.W_k, self.W_v)
        q, k, v = split_heads(qkv, self.n_heads, self.n_kv_heads)

        # Normalise each head before the rotation, which keeps norms. So a gain does not depend on
        # the position, but s_qk after the rotation does. Shapes stay.
        q = self.norm_q(q)
        k = self.norm_k(k)
        q, k = rotate(rotation, q, k)
        if self.s_qk is not None:
            q, k = scale_queries_and_keys(q, k, self.s_qk())
        v = self.norm_v(v)

        # Average the values: (B, H, T, D)
        y = self.attention(*heads_first(q, k, v), documents)

        # Norm and gate on the averages, heads side by side: (B, T, H·D)
        y = self.output(y, h)

        # Project back, with ν_p in W_o: (B, T, d)
        return self.post_norm(self.W_o(y))

    def mlp(self, h: Tensor) -> Tensor:
        """h_M, the suggestion for the second interpolation: h (B, T, d) → (B, T, d)."""
        # u ∘ SiLU(√d z), with ν_uz in W_u and √d ν_uz in W_z: (B, T, f)
        y = swiglu(h, self.W_u, self.W_z)

        # Project back, with ν_d ν_acf in W_d: (B, T, d)
        return self.post_norm(self.W_d(y))

    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply the scores of head i by the square of factors[i], (H,)."""
        if self.s_qk is not None:
            self.s_qk.multiply(factors.repeat_interleave(self.d_head))
        else:
            shrink((self.W_q, self.norm_q), (self.W_k, self.norm_k), factors)


class AnGPTDecoder(NormalisedDecoder):
    """The anGPT network. Initial values: all rows of all matrices uniform on the sphere.

    Α and s_z at `init`.
    """

    block_class = AnGPTBlock
