"""GPT+: the strong baseline. Pre-norm decoder with SwiGLU, RoPE and QK-norm, no biases, untied embeddings.

    h = E[token]
    h = h + W_o · Attn(q, k, v)        q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁;  q, k → rms·gain → RoPE
    h = h + W_d (u ∘ SiLU(z))          u = W_u x, z = W_z x with x = rms(h)·g₂
    logits = W_head (rms(h)·g_f)

With rotary fraction 1 a block is Qwen3's (arXiv 2505.09388). Shape letters as in `anlit.models.decoder`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anlit.attention.around import AroundAttention, AttentionOutput
from anlit.attention.attention import Attention, Backend
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.plain import Plain
from anlit.errors import UserError
from anlit.layers.linear import ScaledLinear, joined
from anlit.layers.norms import RMSNorm
from anlit.layers.positions import Positions, RoPE, Rotation, rotate
from anlit.layers.swiglu import swiglu
from anlit.models.decoder import Decoder, attention_layers, split_heads
from anlit.models.runtime import Runtime
from anlit.optim.optimizers import AdamW
from anlit.optim.schedule import Schedule
from anlit.training.language_model import LanguageModel


class GPTBlock(nn.Module):
    """h (B, T, d) → h + attention → h + MLP, each reading a normalised h."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int,
        attention: Attention,
        positions: Positions,
        qk_norm: bool,
        norm_eps: float,
        dropout: float,
        around: AroundAttention,
    ) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        d_head = self.d_head
        self.norm_1, self.norm_2 = RMSNorm(d_model, norm_eps), RMSNorm(d_model, norm_eps)
        self.W_q, self.W_k, self.W_v, self.W_o = (ScaledLinear(d_model, d_model) for _ in range(4))
        self.W_u, self.W_z = (ScaledLinear(d_model, d_ff) for _ in range(2))
        self.W_d = ScaledLinear(d_ff, d_model)
        qk_eps = norm_eps if around.qk_norm_eps is None else around.qk_norm_eps
        self.norm_q, self.norm_k = (
            RMSNorm(d_head, qk_eps, around.qk_gain is not False) if qk_norm else nn.Identity() for _ in range(2)
        )
        if around.qk_clip is not None and qk_norm and around.qk_gain is False:
            raise UserError(
                "around.qk_clip has nothing to shrink where QK-norm has no gain: leave it out, or set qk_norm: false"
            )
        self.norm_v = RMSNorm(d_head, norm_eps) if around.v_norm else nn.Identity()
        self.output = AttentionOutput(d_model, n_heads, around, RMSNorm(d_head, norm_eps), gate_factor=1.0)
        self.post_norm_A, self.post_norm_M = (
            RMSNorm(d_model, norm_eps) if around.post_norm else nn.Identity() for _ in range(2)
        )
        self.positions, self.attention = positions, attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        h = h + self.dropout(self.post_norm_A(self.attend(self.norm_1(h), documents, rotation)))
        return h + self.dropout(self.post_norm_M(self.mlp(self.norm_2(h))))

    def attend(self, x: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        q, k, v = split_heads(joined(x, self.W_q, self.W_k, self.W_v), 3 * self.n_heads).chunk(3, dim=1)  # (B, H, T, D)
        q, k = rotate(rotation, self.norm_q(q), self.norm_k(k))
        return self.W_o(self.output(self.attention(q, k, self.norm_v(v), documents), x))

    def mlp(self, x: Tensor) -> Tensor:
        return self.W_d(swiglu(joined(x, self.W_u, self.W_z)))

    @torch.no_grad()
    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply each head's queries and keys with its entry of factors (H,): their rows, or the norms' gains, which
        all heads share and so follow the smallest entry."""
        for W, norm in ((self.W_q, self.norm_q), (self.W_k, self.norm_k)):
            if isinstance(norm, RMSNorm) and norm.gain is not None:
                norm.gain.mul_(factors.min())
            else:
                W.scale_rows(factors.repeat_interleave(W.out_features // self.n_heads))


class GPTDecoder(Decoder):
    """The GPT+ network. Initial values: matrices N(0, init_std²), W_o and W_d smaller by 1/√(2L), gains 1."""

    def __init__(self, vocab_size: int, d_model: int, blocks: list[GPTBlock], document_masking: bool,
                 norm_eps: float, init_std: float) -> None:  # fmt: skip
        super().__init__(vocab_size, d_model, blocks, document_masking)
        self.norm_f = RMSNorm(d_model, norm_eps)
        self.init_std = init_std
        self.reset_parameters()

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.norm_f(h), None

    def draw(self, name: str, weight: Tensor) -> None:
        residual = name in ("W_o", "W_d")
        weight.normal_(std=self.init_std / math.sqrt(2 * len(self.blocks)) if residual else self.init_std)


class GPT(LanguageModel):
    """GPT+ with its training settings.

    Args:
        vocab_size: V, the number of tokens; `anlit fit` takes that of its data if not given, as a multiple of 128.
        context_length: T, tokens in a training sequence.
        n_layers: L, the number of blocks.
        n_heads: H, attention heads; must divide d_model.
        d_model: d, the width of the hidden state.
        d_ff: f, the width of the MLP; 4·d_model if not given.
        attention: What happens between q·k and the weights.
        positions: RoPE, PRoPE, DynamicNTK or NoPE.
        document_masking: Let a token attend only within its own document.
        backend: The attention kernel; auto takes the fastest that can do the mechanism.
        qk_norm: Normalise queries and keys per head, with a learned gain.
        norm_eps: ε of every RMS norm.
        around: Gates and further norms around attention, QK-clip.
        init_std: Standard deviation of the initial matrices.
        dropout: Share dropped of the attention weights and of each block's two updates.
        z_loss: Weight of the mean squared log-partition of the output softmax in the training loss.
        optimizer: Called with the parameter groups; any torch optimizer, or anlit's MuonAdamW.
        schedule: Learning rate over the run.
        runtime: Compiled blocks, activation checkpointing, late initial values.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        context_length: int = 2048,
        n_layers: int = 12,
        n_heads: int = 12,
        d_model: int = 768,
        d_ff: int | None = None,
        attention: Mechanism = Plain(),
        positions: Positions = RoPE(fraction=0.5),
        document_masking: bool = True,
        backend: Backend = "auto",
        qk_norm: bool = True,
        norm_eps: float = 1e-6,
        around: AroundAttention = AroundAttention(),
        init_std: float = 0.02,
        dropout: float = 0.0,
        z_loss: float = 0.0,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = lambda groups: AdamW(
            groups, lr=1e-3, weight_decay=0.1
        ),
        schedule: Schedule = Schedule(warmup=0.2),
        runtime: Runtime = Runtime(),
    ) -> None:
        super().__init__(vocab_size, context_length, z_loss, optimizer, schedule, runtime)
        self.save_hyperparameters(logger=False)
        d_ff = d_ff or 4 * d_model
        positions = positions.for_context(context_length)
        with runtime.device():
            layers = attention_layers(attention, positions, backend, dropout, around, d_model, n_heads, n_layers)
            blocks = [GPTBlock(d_model, d_ff, n_heads, *layer, qk_norm, norm_eps, dropout, around) for layer in layers]
            self.model = GPTDecoder(self.vocab_size, d_model, blocks, document_masking, norm_eps, init_std)
