"""nGPT: representation learning on the hypersphere (Loshchilov et al., ICLR 2025, arXiv 2410.01131).

    h = E[token]                                            every vector along the embedding axis has norm 1
    q = unit(RoPE(W_q h)) ∘ s_qk, k likewise, per head      softmax scale √D
    h_A = unit(W_o · Attn(q, k, v))                         h ← unit(h + |α_A| ∘ (h_A − h))
    u = s_u ∘ W_u h,  z = √d · s_v ∘ W_z h
    h_M = unit(W_d (u ∘ SiLU(z)))                           h ← unit(h + |α_M| ∘ (h_M − h))
    logits = s_z ∘ (W_head h)

No norm layer, no weight decay, no warm-up. The paper's public code rotates q and k by something that is no
rotation; here RoPE is one, and QK normalisation is per head. A learned s_qk after RoPE makes scores depend on the
absolute position, so positions restart with each masked document. Shape letters as in `anlit.models.decoder`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
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
from anlit.layers.norms import Norms, RMSNorm, UnitNorm, bound_norm, set_unit_norm, unit
from anlit.layers.positions import Positions, RoPE, Rotation, rotate
from anlit.layers.scaling import ScalingVector
from anlit.layers.swiglu import swiglu
from anlit.models.decoder import Decoder, attention_layers, draw_unit_vectors, split_heads
from anlit.models.runtime import Runtime
from anlit.optim.optimizers import AdamW
from anlit.optim.schedule import Schedule
from anlit.training.language_model import LanguageModel


class NGPTBlock(nn.Module):
    """h (B, T, d) of norm 1 → two steps on the sphere, towards the attention's and the MLP's suggestion."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int,
        attention: Attention,
        positions: Positions,
        qk_norm: bool,
        dropout: float,
        alpha: tuple[float, float],
        s_qk: tuple[float, float],
        s_uv: tuple[float, float],
        around: AroundAttention,
    ) -> None:
        """`alpha`, `s_qk` and `s_uv` are (init, scale) of the scaling vectors."""
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        d_head = self.d_head
        # √D·unit has unit root mean square: with the 1/√D inside attention that is the softmax scale √D. √d·W h is of
        # that size too, for W's rows have norm 1: so it is without QK-norm, and what a finite ε is added to (our
        # choices; the paper always normalises).
        self.W_q, self.W_k = (ScaledLinear(d_model, d_model, 1.0 if qk_norm else math.sqrt(d_model)) for _ in range(2))
        self.W_v, self.W_o = ScaledLinear(d_model, d_model), ScaledLinear(d_model, d_model)
        self.norm_qk: nn.Module = nn.Identity()
        if qk_norm and around.qk_norm_eps:
            self.norm_qk = RMSNorm(d_head, around.qk_norm_eps / d_model, has_gain=False)
        elif qk_norm:
            self.norm_qk = UnitNorm(math.sqrt(d_head))
        self.W_u, self.W_z = ScaledLinear(d_model, d_ff), ScaledLinear(d_model, d_ff, factor=math.sqrt(d_model))
        self.W_d = ScaledLinear(d_ff, d_model)
        self.alpha_A, self.alpha_M = ScalingVector(d_model, *alpha), ScalingVector(d_model, *alpha)
        self.s_qk = ScalingVector(d_model, *s_qk) if around.qk_gain is not False else None
        if around.qk_clip is not None and self.s_qk is None:
            raise UserError("around.qk_clip shrinks nGPT's s_qk: set around.qk_gain: true, or leave qk_clip out")
        self.norm_v = UnitNorm() if around.v_norm else nn.Identity()
        self.output = AttentionOutput(d_model, n_heads, around, UnitNorm(), gate_factor=math.sqrt(d_model))
        self.s_u, self.s_v = ScalingVector(d_ff, *s_uv), ScalingVector(d_ff, *s_uv)
        self.positions, self.attention = positions, attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        h = unit(self.step(h, unit(self.attend(h, documents, rotation)), self.alpha_A()))
        return unit(self.step(h, unit(self.mlp(h)), self.alpha_M()))

    def step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """h + |α| ∘ (suggestion − h)."""
        return torch.lerp(h, self.dropout(suggestion).to(h.dtype), alpha.abs())

    def attend(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        q, k, v = split_heads(joined(h, self.W_q, self.W_k, self.W_v), 3 * self.n_heads).chunk(3, dim=1)  # (B, H, T, D)
        q, k = (self.norm_qk(x) for x in rotate(rotation, q, k))
        if self.s_qk is not None:
            s_qk = self.s_qk().view(self.n_heads, 1, -1)
            q, k = (q * s_qk).to(v.dtype), (k * s_qk).to(v.dtype)
        return self.W_o(self.output(self.attention(q, k, self.norm_v(v), documents), h))

    def mlp(self, h: Tensor) -> Tensor:
        uz = joined(h, self.W_u, self.W_z, scales=(self.s_u(), self.s_v()))  # W_z carries the factor √d
        return self.W_d(swiglu(uz))

    @torch.no_grad()
    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply each head's queries and keys with its entry of factors (H,), by its entries of s_qk."""
        assert self.s_qk is not None
        self.s_qk.multiply(factors.repeat_interleave(self.s_qk.stored.numel() // self.n_heads))


class NGPTDecoder(Decoder):
    """The nGPT network. Initial values: every vector along the embedding axis uniform on the sphere; s at `init`."""

    def __init__(self, vocab_size: int, d_model: int, blocks: list[NGPTBlock], document_masking: bool,
                 s_z_init: float, s_z_scale: float, norms: Norms = "strict") -> None:  # fmt: skip
        super().__init__(vocab_size, d_model, blocks, document_masking)
        self.norms = norms
        self.s_z = ScalingVector(vocab_size, s_z_init, s_z_scale)
        self.reset_parameters()

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return h, self.s_z()

    def constrained(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each matrix with the axis that holds the embedding: the output axis of W_o and W_d, else the input axis.

        Without the gates W_g, which start at 0 and so cannot have norm 1: their rows are bounded by it (our choice).
        """
        return ((weight, embedding_axis(name)) for name, weight in self.matrices() if name != "W_g")

    def draw(self, name: str, weight: Tensor) -> None:
        draw_unit_vectors(weight, embedding_axis(name))

    def restore_norms(self) -> None:
        restore = bound_norm if self.norms == "bounded" else set_unit_norm
        for parameter, dim in self.constrained():
            restore(parameter, dim)
        for name, weight in self.matrices():
            if name == "W_g":
                bound_norm(weight, dim=1)

    def row_norms(self) -> Iterator[Tensor]:
        return (torch.linalg.vector_norm(parameter.detach(), dim=dim) for parameter, dim in self.constrained())


def embedding_axis(name: str) -> int:
    """The axis of a matrix along which its vectors have norm 1; `name` is that of its map."""
    return 0 if name in ("W_o", "W_d") else 1


class NGPT(LanguageModel):
    """nGPT with its training settings.

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
        qk_norm: Normalise queries and keys per head.
        norms: Vectors set to norm 1 after each step, or bounded by it as in anGPT (an ablation).
        around: Gates and further norms around attention, QK-clip.
        dropout: Share dropped of the attention weights and of each block's two updates.
        alpha_init: Initial step size α of both residual updates; of order 1/n_layers.
        alpha_scale: How fast α learns relative to the matrices; 1/√d_model if not given.
        s_qk_init: Initial scale of queries and keys.
        s_qk_scale: How fast it learns relative to the matrices; 1/√d_model if not given.
        s_uv_init: Initial scale of the MLP's u and z.
        s_uv_scale: How fast it learns relative to the matrices.
        s_z_init: Initial scale of the logits.
        s_z_scale: How fast the scale of the logits learns relative to the matrices; 1/√d_model if not given.
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
        around: AroundAttention = AroundAttention(),
        norms: Norms = "strict",
        dropout: float = 0.0,
        alpha_init: float = 0.05,
        alpha_scale: float | None = None,
        s_qk_init: float = 1.0,
        s_qk_scale: float | None = None,
        s_uv_init: float = 1.0,
        s_uv_scale: float = 1.0,
        s_z_init: float = 1.0,
        s_z_scale: float | None = None,
        z_loss: float = 0.0,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = lambda groups: AdamW(
            groups, lr=1e-3, weight_decay=0.0
        ),
        schedule: Schedule = Schedule(warmup=0.0),
        runtime: Runtime = Runtime(),
    ) -> None:
        super().__init__(vocab_size, context_length, z_loss, optimizer, schedule, runtime)
        self.save_hyperparameters(logger=False)
        d_ff = d_ff or 4 * d_model
        slow = 1 / math.sqrt(d_model)
        alpha = (alpha_init, slow if alpha_scale is None else alpha_scale)
        s_qk = (s_qk_init, slow if s_qk_scale is None else s_qk_scale)
        s_uv, s_z = (s_uv_init, s_uv_scale), (s_z_init, slow if s_z_scale is None else s_z_scale)
        positions = positions.for_context(context_length)
        with runtime.device():
            layers = attention_layers(attention, positions, backend, dropout, around, d_model, n_heads, n_layers)
            blocks = [
                NGPTBlock(d_model, d_ff, n_heads, *layer, qk_norm, dropout, alpha, s_qk, s_uv, around)
                for layer in layers
            ]
            self.model = NGPTDecoder(self.vocab_size, d_model, blocks, document_masking, *s_z, norms)
