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
from torch.nn.functional import silu

from anlit.attention.attention import Attention, Backend
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.plain import Plain
from anlit.layers.linear import ScaledLinear
from anlit.layers.norms import set_unit_norm, unit
from anlit.layers.positions import Positions, RoPE
from anlit.layers.scaling import ScalingVector
from anlit.models.decoder import Decoder, attention_layers, draw_unit_vectors, merge_heads, split_heads
from anlit.training.language_model import LanguageModel
from anlit.training.optimizers import AdamW
from anlit.training.schedule import Schedule


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
    ) -> None:
        """`alpha`, `s_qk` and `s_uv` are (init, scale) of the scaling vectors."""
        super().__init__()
        self.n_heads, self.qk_norm = n_heads, qk_norm
        self.sqrt_d, self.sqrt_d_head = math.sqrt(d_model), math.sqrt(d_model // n_heads)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.W_u, self.W_z = ScaledLinear(d_model, d_ff), ScaledLinear(d_model, d_ff, factor=self.sqrt_d)
        self.W_d = nn.Linear(d_ff, d_model, bias=False)
        self.alpha_A, self.alpha_M = ScalingVector(d_model, *alpha), ScalingVector(d_model, *alpha)
        self.s_qk = ScalingVector(d_model, *s_qk)
        self.s_u, self.s_v = ScalingVector(d_ff, *s_uv), ScalingVector(d_ff, *s_uv)
        self.positions, self.attention = positions, attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, documents: Documents) -> Tensor:
        h = unit(self.step(h, unit(self.attend(h, documents)), self.alpha_A()))
        return unit(self.step(h, unit(self.mlp(h)), self.alpha_M()))

    def step(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """h + |α| ∘ (suggestion − h)."""
        return torch.lerp(h, self.dropout(suggestion).to(h.dtype), alpha.abs())

    def attend(self, h: Tensor, documents: Documents) -> Tensor:
        q, k, v = (split_heads(W(h), self.n_heads) for W in (self.W_q, self.W_k, self.W_v))  # (B, H, T, D)
        q, k = self.positions(q, k, index=documents.positions)
        s_qk = self.s_qk().view(self.n_heads, 1, -1)
        # √D·unit has unit root mean square: with the 1/√D inside attention that is the softmax scale √D. Without
        # QK-norm √d·W h is of that size, for W's rows have norm 1 (our choice; the paper always normalises).
        q, k = ((unit(x) * self.sqrt_d_head if self.qk_norm else x * self.sqrt_d) for x in (q, k))
        return self.W_o(merge_heads(self.attention((q * s_qk).to(v.dtype), (k * s_qk).to(v.dtype), v, documents)))

    def mlp(self, h: Tensor) -> Tensor:
        u, z = self.W_u(h, self.s_u()), self.W_z(h, self.s_v())  # W_z carries the factor √d
        return self.W_d(u * silu(z))


class NGPTDecoder(Decoder):
    """The nGPT network. Initial values: every vector along the embedding axis uniform on the sphere; s at `init`."""

    def __init__(self, vocab_size: int, d_model: int, blocks: list[NGPTBlock], document_masking: bool,
                 s_z_init: float, s_z_scale: float) -> None:  # fmt: skip
        super().__init__(vocab_size, d_model, blocks, document_masking)
        self.s_z = ScalingVector(vocab_size, s_z_init, s_z_scale)
        self.reset_parameters()

    def logits(self, h: Tensor) -> Tensor:
        return self.head(h, self.s_z())

    def constrained(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Each matrix with the axis that holds the embedding: the output axis of W_o and W_d, else the input axis."""
        return ((weight, 0 if name in ("W_o", "W_d") else 1) for name, weight in self.matrices())

    def reset_parameters(self) -> None:
        for parameter, dim in self.constrained():
            draw_unit_vectors(parameter, dim)
        for module in self.modules():
            if isinstance(module, ScalingVector):
                module.reset_parameters()

    def restore_norms(self) -> None:
        for parameter, dim in self.constrained():
            set_unit_norm(parameter, dim)

    def row_norms(self) -> Iterator[Tensor]:
        return (torch.linalg.vector_norm(parameter.detach(), dim=dim) for parameter, dim in self.constrained())


class NGPT(LanguageModel):
    """nGPT with its training settings.

    Args:
        vocab_size: V, the number of tokens; that of the data's tokenizer.
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
    """

    def __init__(
        self,
        vocab_size: int = 50_304,
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
    ) -> None:
        super().__init__(vocab_size, context_length, z_loss, optimizer, schedule)
        self.save_hyperparameters(logger=False)
        d_ff = d_ff or 4 * d_model
        slow = 1 / math.sqrt(d_model)
        alpha = (alpha_init, slow if alpha_scale is None else alpha_scale)
        s_qk = (s_qk_init, slow if s_qk_scale is None else s_qk_scale)
        s_uv, s_z = (s_uv_init, s_uv_scale), (s_z_init, slow if s_z_scale is None else s_z_scale)
        positions = positions.for_context(context_length)
        layers = attention_layers(attention, positions, backend, dropout, d_model, n_heads, n_layers)
        blocks = [
            NGPTBlock(d_model, d_ff, n_heads, layer, positions, qk_norm, dropout, alpha, s_qk, s_uv) for layer in layers
        ]
        self.model = NGPTDecoder(vocab_size, d_model, blocks, document_masking, *s_z)
