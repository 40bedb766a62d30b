"""anGPT: the approximately normalised transformer (Franke et al., NeurIPS 2025, arXiv 2505.22014).

Constants that need no data replace the norm layers, because ‖g(x)‖ of a high-dimensional unit x concentrates at
its mean; rows of the weights are bounded by 1. ν = 1/√E‖g(x)‖², see `anlit.nn.layers.norms`.

    h = E[token]
    q, k, v = ν_qkv W h;   q, k → RoPE → rms (QK-norm; no gain: our reading)          softmax scale 1/√D
    h_A = ν_p W_o · Attn(q, k, v)                                        h ← ν(α_A) ∘ (h + α_A ∘ (h_A − h))
    u = ν_uz W_u h,  z = ν_uz W_z h
    h_M = ν_d W_d (ν_acf · u ∘ SiLU(√d z))                               h ← ν(α_M) ∘ (h + α_M ∘ (h_M − h))
    logits = s_z ∘ (W_head h)

The attention average has no factor, which is exact if attention is peaked. The only norm layer is QK-norm. No weight
decay, no warm-up. Two settings take a part of nGPT in place of the paper's: `s_qk` multiplies q and k after the QK-norm
(q ∘ s_qk), `silu_std` gives √d z another standard deviation than √(d/f). Shape letters as in `anlit.nn.models.decoder`.
"""

import math
from dataclasses import dataclass

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
from anlit.nn.models.decoder import NormalisedDecoder, split_heads


@dataclass(frozen=True)
class Approximation:
    """Deviations of anGPT's factors from the paper, for ablations.

    Args:
        residual_factor: Multiply each update by ν(α). Without it the norm of h changes and training is less stable.
        error: Multiply every constant factor (ν_qkv, ν_p, ν_uz, ν_acf, ν_d) by 1 + error.
    """

    residual_factor: bool = True
    error: float = 0.0


@dataclass(frozen=True)
class AnGPTConfig(NormalisedConfig):
    """Settings of anGPT.

    Args:
        norm_eps: ε of the QK-norm, added to a mean square of about 1/d_head, where qk_norm_eps is not given.
        norms: Rows bounded by norm 1 after each step, or set to it (an ablation).
        approximation: Deviations of the factors, for ablations.
        s_qk: Multiply q and k by a learned vector after RoPE and QK-norm, one number per head and dimension, as nGPT
            does: init 1, scale 1/√d_model. The paper has none.
        silu_std: Standard deviation σ of SiLU's argument. By default √(d_model/d_ff), the paper's; nGPT's is 1. ν_acf
            is that of σ.
    """

    norm_eps: float = 1e-6
    norms: Norms = "bounded"
    approximation: Approximation = Approximation()
    s_qk: bool = False
    silu_std: float | None = None


class AnGPTBlock(nn.Module):
    """h (B, T, d) of norm about 1 → the same, after interpolations towards the attention's and the MLP's output."""

    def __init__(self, config: AnGPTConfig, layer: int) -> None:
        super().__init__()
        d, f, root_d = config.d_model, config.d_hidden, math.sqrt(config.d_model)
        self.n_heads, self.n_kv_heads, self.d_head = (
            config.n_heads,
            config.kv_heads,
            config.head_width,
        )
        q_width, kv_width = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        scale = 1 + config.approximation.error
        # H concatenated unit vectors have norm √H, also where heads share keys, so ν_p = √(H·D/d)/√H.
        nu_qkv, nu_p = scale * nu_linear(d, self.d_head), scale * nu_linear(self.d_head, d)
        silu_std = nu_linear(d, f) if config.silu_std is None else config.silu_std
        nu_uz, nu_d, nu_acf = (
            scale * nu_linear(d, f),
            scale * nu_linear(f, d),
            scale * nu_activation(silu_std),
        )
        self.has_residual_factor = config.approximation.residual_factor
        # Every constant is the factor of a map, also if it multiplies the map's input: scalars commute with W. Without
        # QK-norm q and k have norm about 1, so the factor √D gives them a root mean square of about 1 (our choice).
        qk_factor = nu_qkv if config.qk_norm else math.sqrt(self.d_head) * nu_qkv
        self.W_q, self.W_k = (ScaledLinear(d, width, qk_factor) for width in (q_width, kv_width))
        self.W_v, self.W_o = ScaledLinear(d, kv_width, nu_qkv), ScaledLinear(q_width, d, nu_p)
        self.W_u, self.W_z = (
            ScaledLinear(d, f, nu_uz),
            ScaledLinear(d, f, root_d * scale * silu_std),
        )
        self.W_d = ScaledLinear(f, d, nu_d * nu_acf)
        self.alpha_A, self.alpha_M = config.alpha(), config.alpha()
        # Rotations keep norms, so QK-norm may come before RoPE. A gain before RoPE does not depend on the position.
        qk_eps = config.norm_eps if config.qk_norm_eps is None else config.qk_norm_eps / self.d_head
        has_gain = config.qk_norm_gain is True
        self.norm_q, self.norm_k = (
            RMSNorm(self.d_head, qk_eps, has_gain) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.s_qk = config.scaling(q_width, 1.0, None) if config.s_qk else None
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        self.output = config.attention_output(UnitNorm(), gate_factor=root_d)
        self.post_norm = UnitNorm() if config.post_norm else nn.Identity()
        self.positions = config.positions.for_layer(layer)
        self.attention = config.attention_of(layer, has_gain or config.s_qk or not config.qk_norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        h = self.interpolate(h, self.post_norm(self.attend(h, documents, rotation)), self.alpha_A())
        return self.interpolate(h, self.post_norm(self.mlp(h)), self.alpha_M())

    def interpolate(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """ν(α) ∘ (h + α ∘ (suggestion − h)), written as two weights for h and for the suggestion."""
        weight_of_h, weight_of_suggestion = self.residual_weights(alpha)
        return torch.addcmul(weight_of_h * h, weight_of_suggestion, self.dropout(suggestion))

    def residual_weights(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """ν(α)(1 − α) and ν(α)α, each (d,); without ν if `residual_factor` is off."""
        if not self.has_residual_factor:
            return 1 - alpha, alpha
        nu = nu_residual(alpha)
        return nu * (1 - alpha), nu * alpha

    def attend(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        q, k, v = split_heads(
            fused_linear(h, self.W_q, self.W_k, self.W_v), self.n_heads, self.n_kv_heads
        )
        q, k = rotate(rotation, self.norm_q(q), self.norm_k(k))
        if self.s_qk is not None:
            q, k = scale_queries_and_keys(q, k, self.s_qk())
        return self.W_o(self.output(self.attention(q, k, self.norm_v(v), documents), h))

    def mlp(self, h: Tensor) -> Tensor:
        return self.W_d(swiglu(fused_linear(h, self.W_u, self.W_z)))

    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply each head's scores by the square of its entry of factors (H,)."""
        if self.s_qk is not None:
            self.s_qk.multiply(factors.repeat_interleave(self.d_head))
        else:
            shrink((self.W_q, self.norm_q), (self.W_k, self.norm_k), factors)


class AnGPTDecoder(NormalisedDecoder):
    """The anGPT network. Initial values: every row of every matrix uniform on the sphere; α and s_z at `init`."""

    block_class = AnGPTBlock
