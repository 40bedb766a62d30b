"""GPT+: the strong baseline. Pre-norm decoder with SwiGLU, RoPE and QK-norm, no biases, untied embeddings.

    h = E[token]
    h = h + W_o · Attn(q, k, v)        q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁;  q, k → rms·gain → RoPE
    h = h + W_d (u ∘ SiLU(z))          u = W_u x, z = W_z x with x = rms(h)·g₂
    logits = W_head (rms(h)·g_f)

With rotary fraction 1 a block is Qwen3's (arXiv 2505.09388). Shape letters as in `anlit.nn.models.decoder`.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from anlit.nn.attention.qk_clip import shrink
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.linear import ScaledLinear, fused_linear
from anlit.nn.layers.norms import RMSNorm
from anlit.nn.layers.positions import Rotation, rotate
from anlit.nn.layers.swiglu import swiglu
from anlit.nn.models.config import DecoderConfig
from anlit.nn.models.decoder import Decoder, split_heads


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """Settings of GPT+.

    Args:
        norm_eps: ε of every RMS norm.
        init_std: Standard deviation of the initial matrices.
    """

    norm_eps: float = 1e-6
    init_std: float = 0.02


class GPTBlock(nn.Module):
    """h (B, T, d) → h + attention → h + MLP, each reading a normalised h."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        d, f, eps = config.d_model, config.d_hidden, config.norm_eps
        self.n_heads, self.n_kv_heads, self.d_head = (
            config.n_heads,
            config.kv_heads,
            config.head_width,
        )
        q_width, kv_width = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.norm_1, self.norm_2 = RMSNorm(d, eps), RMSNorm(d, eps)
        self.W_q, self.W_k, self.W_v = (
            ScaledLinear(d, width) for width in (q_width, kv_width, kv_width)
        )
        self.W_o = ScaledLinear(q_width, d)
        self.W_u, self.W_z = (ScaledLinear(d, f) for _ in range(2))
        self.W_d = ScaledLinear(f, d)
        qk_eps = eps if config.qk_norm_eps is None else config.qk_norm_eps
        has_gain = config.qk_norm_gain is not False
        self.norm_q, self.norm_k = (
            RMSNorm(self.d_head, qk_eps, has_gain) if config.qk_norm else nn.Identity()
            for _ in range(2)
        )
        self.norm_v = RMSNorm(self.d_head, eps) if config.v_norm else nn.Identity()
        self.output = config.attention_output(RMSNorm(self.d_head, eps), gate_factor=1.0)
        self.post_norm_A, self.post_norm_M = (
            RMSNorm(d, eps) if config.post_norm else nn.Identity() for _ in range(2)
        )
        self.positions = config.positions.for_layer(layer)
        self.attention = config.attention_of(layer, has_gain or not config.qk_norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        h = h + self.dropout(self.post_norm_A(self.attend(self.norm_1(h), documents, rotation)))
        return h + self.dropout(self.post_norm_M(self.mlp(self.norm_2(h))))

    def attend(self, x: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        q, k, v = split_heads(
            fused_linear(x, self.W_q, self.W_k, self.W_v), self.n_heads, self.n_kv_heads
        )
        q, k = rotate(rotation, self.norm_q(q), self.norm_k(k))
        return self.W_o(self.output(self.attention(q, k, self.norm_v(v), documents), x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.W_d(swiglu(fused_linear(x, self.W_u, self.W_z)))

    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply each head's scores by the square of its entry of factors (H,)."""
        shrink((self.W_q, self.norm_q), (self.W_k, self.norm_k), factors)


class GPTDecoder(Decoder):
    """The GPT+ network. Initial values: matrices N(0, init_std²), W_o and W_d smaller by 1/√(2L), gains 1."""

    block_class = GPTBlock

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.norm_f = RMSNorm(config.d_model, config.norm_eps)
        self.init_std = config.init_std
        self.reset_parameters()

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.norm_f(h), None

    def draw(self, name: str, weight: Tensor) -> None:
        residual = name in ("W_o", "W_d")
        weight.normal_(
            std=self.init_std / math.sqrt(2 * len(self.blocks)) if residual else self.init_std
        )
