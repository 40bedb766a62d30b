"""nGPT: representation learning on the hypersphere (Loshchilov et al., ICLR 2025, arXiv 2410.01131).

    h = E[token]                                            every vector along the embedding axis has norm 1
    q = unit(RoPE(W_q h)) ∘ s_qk, k likewise, per head      softmax scale √D
    h_A = unit(W_o · Attn(q, k, v))                         h ← unit(h + |α_A| ∘ (h_A − h))
    u = s_u ∘ W_u h,  z = √d · s_v ∘ W_z h
    h_M = unit(W_d (u ∘ SiLU(z)))                           h ← unit(h + |α_M| ∘ (h_M − h))
    logits = s_z ∘ (W_head h)

No norm layer, no weight decay, no warm-up. RoPE in the paper's public code is not a rotation; here it is,
and QK normalisation is per head. Because s_qk is learned and follows RoPE, scores depend on the absolute position. So
positions restart with each masked document. Shape letters as in `anlit.nn.models.decoder`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anlit.errors import UserError
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.linear import ScaledLinear, fused_linear
from anlit.nn.layers.norms import Norms, RMSNorm, UnitNorm, unit
from anlit.nn.layers.positions import Rotation, rotate
from anlit.nn.layers.scaling import scale_queries_and_keys
from anlit.nn.layers.swiglu import swiglu
from anlit.nn.models.config import NormalisedConfig
from anlit.nn.models.decoder import NormalisedDecoder, split_heads


@dataclass(frozen=True)
class NGPTConfig(NormalisedConfig):
    """Settings of nGPT.

    Args:
        norms: Vectors set to norm 1 after each step, or bounded by it as in anGPT (an ablation).
        alpha_init: As in `NormalisedConfig`; the paper's, of order 1/L.
        s_qk_init: Initial scale of queries and keys.
        s_qk_scale: The scale of s_qk.
        s_uv_init: Initial scale of the MLP's u and z.
        s_uv_scale: The scale of s_u and s_v.
    """

    norms: Norms = "strict"
    alpha_init: float | None = 0.05
    s_qk_init: float = 1.0
    s_qk_scale: float | None = None
    s_uv_init: float = 1.0
    s_uv_scale: float = 1.0


class NGPTBlock(nn.Module):
    """h (B, T, d) of norm 1 → the same, after steps on the sphere towards the attention's and the MLP's output."""

    def __init__(self, config: NGPTConfig, layer: int) -> None:
        super().__init__()
        d, f, root_d = config.d_model, config.d_hidden, math.sqrt(config.d_model)
        self.n_heads, self.n_kv_heads, self.d_head = (
            config.n_heads,
            config.kv_heads,
            config.head_width,
        )
        q_width, kv_width = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        # √D·unit(x) has unit root mean square. With the 1/√D inside attention this gives the softmax scale √D. √d·W h
        # has about that size too, because W's rows have norm 1. It is used without QK-norm, and a finite ε is added to
        # its mean square (our choices; the paper always normalises).
        qk_factor = 1.0 if config.qk_norm else root_d
        self.W_q, self.W_k = (ScaledLinear(d, width, qk_factor) for width in (q_width, kv_width))
        self.W_v, self.W_o = ScaledLinear(d, kv_width), ScaledLinear(q_width, d)
        self.norm_qk: nn.Module = nn.Identity()
        if config.qk_norm and config.qk_norm_eps:
            self.norm_qk = RMSNorm(self.d_head, config.qk_norm_eps / d, has_gain=False)
        elif config.qk_norm:
            self.norm_qk = UnitNorm(math.sqrt(self.d_head))
        self.W_u, self.W_z = ScaledLinear(d, f), ScaledLinear(d, f, factor=root_d)
        self.W_d = ScaledLinear(f, d)
        self.alpha_A, self.alpha_M = config.alpha(), config.alpha()
        has_gain = config.qk_norm_gain is not False
        self.s_qk = (
            config.scaling(q_width, config.s_qk_init, config.s_qk_scale) if has_gain else None
        )
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        self.output = config.attention_output(UnitNorm(), gate_factor=root_d)
        self.s_u, self.s_v = (
            config.scaling(f, config.s_uv_init, config.s_uv_scale) for _ in range(2)
        )
        self.positions, self.attention = (
            config.positions.for_layer(layer),
            config.attention_of(layer, has_gain),
        )
        if config.qk_norm and self.positions.scale != 1:
            raise UserError(
                f"model.positions {type(self.positions).__name__} has attention_factor={self.positions.scale:g}, of "
                "which nGPT's QK-norm, which follows, leaves at most a shift from the dimensions that do not rotate to "
                "those that do: set positions.attention_factor: 1, or qk_norm: false"
            )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        h = unit(self.step(h, unit(self.attend(h, documents, rotation)), self.alpha_A()))
        return unit(self.step(h, unit(self.mlp(h)), self.alpha_M()))

    def step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """h + |α| ∘ (suggestion − h)."""
        return torch.lerp(h, self.dropout(suggestion).to(h.dtype), alpha.abs())

    def attend(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        q, k, v = split_heads(
            fused_linear(h, self.W_q, self.W_k, self.W_v), self.n_heads, self.n_kv_heads
        )
        q, k = (self.norm_qk(x) for x in rotate(rotation, q, k))
        if self.s_qk is not None:
            q, k = scale_queries_and_keys(q, k, self.s_qk())
        return self.W_o(self.output(self.attention(q, k, self.norm_v(v), documents), h))

    def mlp(self, h: Tensor) -> Tensor:
        uz = fused_linear(
            h, self.W_u, self.W_z, scales=(self.s_u(), self.s_v())
        )  # W_z has the factor √d
        return self.W_d(swiglu(uz))

    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply each head's scores by the square of its entry of factors (H,), through its own s_qk."""
        assert self.s_qk is not None
        self.s_qk.multiply(factors.repeat_interleave(self.s_qk.stored.numel() // self.n_heads))


class NGPTDecoder(NormalisedDecoder):
    """The nGPT network. Initial values: every vector along the embedding axis uniform on the sphere; s at `init`."""

    block_class = NGPTBlock

    def axis(self, name: str) -> int:
        """The embedding axis: the output axis of W_o and W_d, else the input axis."""
        return 0 if name in ("W_o", "W_d") else 1
