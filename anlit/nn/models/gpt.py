"""GPT+, the strong baseline: a pre-norm decoder without biases.

It has SwiGLU, RoPE, QK-norm and untied embeddings. With rotary fraction 1 a block is Qwen3's
(arXiv 2505.09388).

    h = E[token]
    h = h + W_o · Attn(q, k, v)      q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁
                                     q, k → rms·gain → RoPE
    h = h + W_d (u ∘ SiLU(z))        u, z = W_u x, W_z x with x = rms(h)·g₂
    logits = W_head (rms(h)·g_f)

Shapes: B batch, T tokens, d model width, H heads of queries, G heads of keys and values.
D head width, f MLP width, V vocabulary.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from anlit.errors import UserError
from anlit.nn.attention.qk_clip import shrink
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.linear import ScaledLinear, fused_linear
from anlit.nn.layers.norms import RMSNorm
from anlit.nn.layers.positions import Rotation, rotate
from anlit.nn.layers.swiglu import swiglu
from anlit.nn.models.config import DecoderConfig
from anlit.nn.models.decoder import Decoder, heads_first, split_heads
from anlit.nn.models.transfer import MUP


@dataclass(frozen=True)
class GPTConfig(DecoderConfig):
    """Settings of GPT+.

    Args:
        norm_eps: ε of every RMS norm.
        init_std: Standard deviation of the initial matrices; with a base, at the base's width.
    """

    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_d_model is not None and self.tie_embeddings:
            raise UserError(
                "model.base_d_model needs two rates and initial values for embedding and head, "
                "which are one matrix here: set model.tie_embeddings: false, or leave "
                "base_d_model out"
            )
        if self.base_n_layers is not None and self.post_norm:
            raise UserError(
                "model.base_n_layers makes W_o and W_d smaller, which the norm behind them "
                "undoes: set model.post_norm: false, or leave base_n_layers out"
            )


class GPTBlock(nn.Module):
    """h (B, T, d) → h + attention → h + MLP, where both read a normalised h."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        d = config.d_model
        f = config.mlp_width
        eps = config.norm_eps
        self.n_heads = config.n_heads
        self.n_kv_heads = config.kv_heads
        self.d_head = config.head_width
        q_width = self.n_heads * self.d_head
        kv_width = self.n_kv_heads * self.d_head
        qk_eps = eps if config.qk_norm_eps is None else config.qk_norm_eps
        has_gain = config.qk_norm_gain is not False

        self.norm_1 = RMSNorm(d, eps)
        self.norm_2 = RMSNorm(d, eps)
        self.W_q = ScaledLinear(d, q_width)
        self.W_k = ScaledLinear(d, kv_width)
        self.W_v = ScaledLinear(d, kv_width)
        self.W_o = ScaledLinear(q_width, d)
        self.W_u = ScaledLinear(d, f)
        self.W_z = ScaledLinear(d, f)
        self.W_d = ScaledLinear(f, d)

        self.norm_q = RMSNorm(self.d_head, qk_eps, has_gain) if config.qk_norm else nn.Identity()
        self.norm_k = RMSNorm(self.d_head, qk_eps, has_gain) if config.qk_norm else nn.Identity()
        self.norm_v = RMSNorm(self.d_head, eps) if config.v_norm else nn.Identity()
        self.output = config.attention_output(RMSNorm(self.d_head, eps), gate_factor=1.0)
        self.post_norm_A = RMSNorm(d, eps) if config.post_norm else nn.Identity()
        self.post_norm_M = RMSNorm(d, eps) if config.post_norm else nn.Identity()
        self.positions = config.positions.for_layer(layer)
        self.attention = config.attention_of(layer, has_gain or not config.qk_norm)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        """h (B, T, d) → (B, T, d)."""
        h = h + self.attend(self.norm_1(h), documents, rotation)
        return h + self.mlp(self.norm_2(h))

    def attend(self, x: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        """The update of h by attention: x (B, T, d) → (B, T, d)."""
        # Project: q (B, T, H, D); k, v (B, T, G, D)
        qkv = fused_linear(x, self.W_q, self.W_k, self.W_v)
        q, k, v = split_heads(qkv, self.n_heads, self.n_kv_heads)

        # Normalise each head, then rotate q and k by their positions. Shapes stay
        q = self.norm_q(q)
        k = self.norm_k(k)
        q, k = rotate(rotation, q, k)
        v = self.norm_v(v)

        # Average the values: (B, H, T, D)
        y = self.attention(*heads_first(q, k, v), documents)

        # Norm and gate on the averages, heads side by side: (B, T, H·D)
        y = self.output(y, x)

        # Project back: (B, T, d)
        return self.dropout(self.post_norm_A(self.W_o(y)))

    def mlp(self, x: Tensor) -> Tensor:
        """The update of h by the MLP: x (B, T, d) → (B, T, d)."""
        # u ∘ SiLU(z): (B, T, f)
        y = swiglu(x, self.W_u, self.W_z)

        # Project back: (B, T, d)
        return self.dropout(self.post_norm_M(self.W_d(y)))

    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply the scores of head i by the square of factors[i], (H,)."""
        shrink((self.W_q, self.norm_q), (self.W_k, self.norm_k), factors)


class GPTDecoder(Decoder):
    """The GPT+ network.

    Initial values: matrices N(0, init_std²), W_o and W_d smaller by 1/√(2L), gains 1. A model may
    be m times as wide and l times as deep as a base of L layers. Then matrices are smaller by 1/√m,
    and the head by 1/m. W_o and W_d are also smaller by 1/l.
    """

    block_class = GPTBlock
    transfer_rules = MUP

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.norm_f = RMSNorm(config.d_model, config.norm_eps)
        self.init_std = config.init_std
        self.base_n_layers = config.base_n_layers or config.n_layers
        self.reset_parameters()

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.norm_f(h), None

    def draw(self, name: str, weight: Tensor) -> None:
        std = self.init_std
        if name == "head":
            std /= self.transfer.width
        elif name != "embedding":
            std /= math.sqrt(self.transfer.width)
        if name in ("W_o", "W_d"):
            std /= math.sqrt(2 * self.base_n_layers) * self.transfer.depth
        weight.normal_(std=std)
