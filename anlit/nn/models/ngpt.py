"""nGPT: learning on the hypersphere (Loshchilov et al., ICLR 2025, arXiv 2410.01131).

    h = E[token]                                  all vectors along the embedding axis have norm 1
    q = unit(RoPE(W_q h)) ∘ s_qk, k likewise      per head; softmax scale √D
    h_A = unit(W_o · Attn(q, k, v))               h ← unit(h + |α_A| ∘ (h_A − h))
    u = s_u ∘ W_u h,  z = √d · s_v ∘ W_z h
    h_M = unit(W_d (u ∘ SiLU(z)))                 h ← unit(h + |α_M| ∘ (h_M − h))
    logits = s_z ∘ (W_head h)

There are no norm layers, no weight decay and no warm-up.

Deviations: RoPE in the paper's public code is not a rotation. Here it is. QK normalisation is per
head. The learned s_qk follows RoPE. So scores depend on the absolute position. Positions therefore
restart with each masked document.

Shapes: B batch, T tokens, d model width, H heads of queries, G heads of keys and values.
D head width, f MLP width, V vocabulary.
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
from anlit.nn.models.decoder import NormalisedDecoder, heads_first, split_heads


@dataclass(frozen=True)
class NGPTConfig(NormalisedConfig):
    """Settings of nGPT.

    Args:
        norms: Vectors set to norm 1 after each step, or bounded by it as in anGPT (an ablation).
        alpha_init: Initial step size α of both residual updates, by default the paper's. If null it
            is 1/n_layers. A number is the base's, and is divided by n_layers/base_n_layers.
        s_qk_init: Initial scale of queries and keys.
        s_qk_scale: The scale of s_qk. By default 1/√d_model, or 1/√base_d_model.
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
    """h (B, T, d) of norm 1 → the same, after steps towards attention's and MLP's output."""

    def __init__(self, config: NGPTConfig, layer: int) -> None:
        super().__init__()
        d = config.d_model
        f = config.mlp_width
        root_d = math.sqrt(d)
        self.n_heads = config.n_heads
        self.n_kv_heads = config.kv_heads
        self.d_head = config.head_width
        q_width = self.n_heads * self.d_head
        kv_width = self.n_kv_heads * self.d_head
        has_gain = config.qk_norm_gain is not False

        # √D·unit(x) has unit root mean square. With the 1/√D inside attention this gives the
        # softmax scale √D. √d·W h has about that size too, because the rows of W have norm 1. Our
        # choices: √d·W h serves without QK-norm, and a finite ε is added to its mean square. The
        # paper always normalises.
        qk_factor = 1.0 if config.qk_norm else root_d
        self.W_q = ScaledLinear(d, q_width, qk_factor)
        self.W_k = ScaledLinear(d, kv_width, qk_factor)
        self.W_v = ScaledLinear(d, kv_width)
        self.W_o = ScaledLinear(q_width, d)
        self.norm_qk: nn.Module = nn.Identity()
        if config.qk_norm and config.qk_norm_eps:
            self.norm_qk = RMSNorm(self.d_head, config.qk_norm_eps / d, has_gain=False)
        elif config.qk_norm:
            self.norm_qk = UnitNorm(math.sqrt(self.d_head))
        self.W_u = ScaledLinear(d, f)
        self.W_z = ScaledLinear(d, f, factor=root_d)
        self.W_d = ScaledLinear(f, d)

        self.alpha_A = config.alpha()
        self.alpha_M = config.alpha()
        self.s_qk = None
        if has_gain:
            self.s_qk = config.scaling(q_width, config.s_qk_init, config.s_qk_scale)
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        self.output = config.attention_output(UnitNorm(), gate_factor=root_d)
        self.s_u = config.scaling(f, config.s_uv_init, config.s_uv_scale)
        self.s_v = config.scaling(f, config.s_uv_init, config.s_uv_scale)
        self.positions = config.positions.for_layer(layer)
        self.attention = config.attention_of(layer, has_gain)
        if config.qk_norm and self.positions.scale != 1:
            raise UserError(
                f"model.positions {type(self.positions).__name__} has "
                f"attention_factor={self.positions.scale:g}, which nGPT's QK-norm after the "
                "rotation cancels: set positions.attention_factor: 1, or qk_norm: false"
            )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        """h (B, T, d) → (B, T, d), both of norm 1 along d."""
        h = self.step(h, self.attend(h, documents, rotation), self.alpha_A())
        return self.step(h, self.mlp(h), self.alpha_M())

    def step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """unit(h + |α| ∘ (suggestion − h)), (B, T, d); α (d,)."""
        return unit(torch.lerp(h, self.dropout(suggestion).to(h.dtype), alpha.abs()))

    def attend(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        """h_A, the suggestion for the first step: h (B, T, d) → (B, T, d)."""
        # Project: q (B, T, H, D); k, v (B, T, G, D)
        qkv = fused_linear(h, self.W_q, self.W_k, self.W_v)
        q, k, v = split_heads(qkv, self.n_heads, self.n_kv_heads)

        # Rotate q and k by their positions, then normalise each head and scale it. Shapes stay
        q, k = self.rotate_and_normalise(q, k, rotation)
        if self.s_qk is not None:
            q, k = scale_queries_and_keys(q, k, self.s_qk())
        v = self.norm_v(v)

        # Average the values: (B, H, T, D)
        y = self.attention(*heads_first(q, k, v), documents)

        # Norm and gate on the averages, heads side by side: (B, T, H·D)
        y = self.output(y, h)

        # Project back to the sphere: (B, T, d)
        return unit(self.W_o(y))

    def rotate_and_normalise(
        self, q: Tensor, k: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """√D·unit(RoPE(q)) and the same of k, of the same shapes (B, T, H, D) and (B, T, G, D).

        A rotation keeps lengths. So compiled code normalises first: then a GPU's backward pass
        moves less memory.
        """
        if torch.compiler.is_compiling():
            return rotate(rotation, self.norm_qk(q), self.norm_qk(k))
        q, k = rotate(rotation, q, k)
        return self.norm_qk(q), self.norm_qk(k)

    def mlp(self, h: Tensor) -> Tensor:
        """h_M, the suggestion for the second step: h (B, T, d) → (B, T, d)."""
        # (s_u ∘ W_u h) ∘ SiLU(√d · s_v ∘ W_z h), where W_z has the factor √d: (B, T, f)
        y = swiglu(h, self.W_u, self.W_z, self.s_u(), self.s_v())

        # Project back to the sphere: (B, T, d)
        return unit(self.W_d(y))

    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply the scores of head i by the square of factors[i], (H,), through s_qk."""
        assert self.s_qk is not None
        self.s_qk.multiply(factors.repeat_interleave(self.d_head))


class NGPTDecoder(NormalisedDecoder):
    """The nGPT network. Initial values: all vectors along the embedding axis uniform on the sphere.

    s at `init`.
    """

    block_class = NGPTBlock

    def axis(self, name: str) -> int:
        """The embedding axis: the output axis of W_o and W_d, else the input axis."""
        return 0 if name in ("W_o", "W_d") else 1
