"""anGPT: the approximately normalised transformer (Franke et al., NeurIPS 2025, arXiv 2505.22014).

Constants that need no data replace the norm layers, because ‖g(x)‖ of a high-dimensional unit x concentrates at
its mean; rows of the weights are bounded by 1. ν = 1/√E‖g(x)‖², see `anlit.layers.norms`.

    h = E[token]
    q, k, v = ν_qkv W h;   q, k → RoPE → rms (QK-norm, no gain)          softmax scale 1/√D
    h_A = ν_p W_o · Attn(q, k, v)                                        h ← ν(α_A) ∘ (h + α_A ∘ (h_A − h))
    u = ν_uz W_u h,  z = ν_uz W_z h
    h_M = ν_d W_d (ν_acf · u ∘ SiLU(√d z))                               h ← ν(α_M) ∘ (h + α_M ∘ (h_M − h))
    logits = s_z ∘ (W_head h)

The attention average has no factor (exact where attention is peaked). No norm layer but QK-norm, no weight decay,
no warm-up. Shape letters as in `anlit.models.decoder`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from anlit.layers.norms import (
    Norms,
    RMSNorm,
    UnitNorm,
    bound_norm,
    nu_activation,
    nu_concatenated_heads,
    nu_linear,
    nu_residual,
    set_unit_norm,
)
from anlit.layers.positions import Positions, RoPE, Rotation, rotate
from anlit.layers.scaling import ScalingVector
from anlit.layers.swiglu import swiglu
from anlit.models.decoder import Decoder, attention_layers, draw_unit_vectors, split_heads
from anlit.models.runtime import Runtime
from anlit.optim.optimizers import AdamW
from anlit.optim.schedule import Schedule
from anlit.training.language_model import LanguageModel


@dataclass(frozen=True)
class Approximation:
    """How anGPT's factors deviate from the paper's; for ablations.

    Args:
        residual_factor: Multiply each update with ν(α); without it h grows or shrinks and training is less stable.
        error: Every constant factor (ν_qkv, ν_p, ν_uz, ν_acf, ν_d) is taken 1 + error times.
    """

    residual_factor: bool = True
    error: float = 0.0

    def __post_init__(self) -> None:
        if self.error <= -1:
            raise ValueError(f"approximation.error={self.error} must be above -1, or the factors vanish")


class AnGPTBlock(nn.Module):
    """h (B, T, d) of norm about 1 → two interpolations, towards the attention's and the MLP's suggestion."""

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
        alpha_init: float,
        alpha_scale: float,
        around: AroundAttention,
        approximation: Approximation = Approximation(),
    ) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        d_head, off = self.d_head, 1 + approximation.error
        nu_qkv, nu_p = off * nu_linear(d_model, d_head), off * nu_concatenated_heads(n_heads)
        nu_uz, nu_d = off * nu_linear(d_model, d_ff), off * nu_linear(d_ff, d_model)
        nu_acf = off * nu_activation(d_model, d_ff)
        self.has_residual_factor = approximation.residual_factor
        # Every constant stands with the map that it multiplies, or that multiplies it: scalars commute with W.
        # Without QK-norm q and k have norm about 1, so √D of them has root mean square about 1 (our choice).
        qk_factor = nu_qkv if qk_norm else math.sqrt(d_head) * nu_qkv
        self.W_q, self.W_k = (ScaledLinear(d_model, d_model, qk_factor) for _ in range(2))
        self.W_v = ScaledLinear(d_model, d_model, nu_qkv)
        self.W_o = ScaledLinear(d_model, d_model, nu_p)
        self.W_u = ScaledLinear(d_model, d_ff, nu_uz)
        self.W_z = ScaledLinear(d_model, d_ff, math.sqrt(d_model) * nu_uz)
        self.W_d = ScaledLinear(d_ff, d_model, nu_d * nu_acf)
        self.alpha_A = ScalingVector(d_model, alpha_init, alpha_scale)
        self.alpha_M = ScalingVector(d_model, alpha_init, alpha_scale)
        # Rotations keep norms: normalised before RoPE is normalised after it, and a gain there is no gain by position.
        qk_eps = norm_eps if around.qk_norm_eps is None else around.qk_norm_eps / d_head
        self.norm_q, self.norm_k = (
            RMSNorm(d_head, qk_eps, around.qk_gain is True) if qk_norm else nn.Identity() for _ in range(2)
        )
        if around.qk_clip is not None and qk_norm and around.qk_gain is not True:
            raise UserError(
                "around.qk_clip has nothing to shrink in an AnGPT with QK-norm, whose scores are bounded by √d_head: "
                "leave it out, or set qk_norm: false or around.qk_gain: true"
            )
        self.norm_v = UnitNorm() if around.v_norm else nn.Identity()
        self.output = AttentionOutput(d_model, n_heads, around, UnitNorm(), gate_factor=math.sqrt(d_model))
        self.post_norm = UnitNorm() if around.post_norm else nn.Identity()
        self.positions, self.attention = positions, attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        h = self.interpolate(h, self.post_norm(self.attend(h, documents, rotation)), self.alpha_A())
        return self.interpolate(h, self.post_norm(self.mlp(h)), self.alpha_M())

    def interpolate(self, h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        """ν(α) ∘ (h + α ∘ (suggestion − h)), written as two weights for h and for the suggestion."""
        weight_of_h, weight_of_suggestion = self.residual_weights(alpha)
        return torch.addcmul(weight_of_h * h, weight_of_suggestion, self.dropout(suggestion))

    def residual_weights(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """ν(α)(1 − α) and ν(α)α, (d,) each, or without the factor."""
        if not self.has_residual_factor:
            return 1 - alpha, alpha
        nu = nu_residual(alpha)
        return nu * (1 - alpha), nu * alpha

    def attend(self, h: Tensor, documents: Documents, rotation: Rotation | None) -> Tensor:
        q, k, v = split_heads(joined(h, self.W_q, self.W_k, self.W_v), 3 * self.n_heads).chunk(3, dim=1)  # (B, H, T, D)
        q, k = rotate(rotation, self.norm_q(q), self.norm_k(k))
        return self.W_o(self.output(self.attention(q, k, self.norm_v(v), documents), h))

    def mlp(self, h: Tensor) -> Tensor:
        return self.W_d(swiglu(joined(h, self.W_u, self.W_z)))

    @torch.no_grad()
    def shrink_qk(self, factors: Tensor) -> None:
        """Multiply each head's queries and keys with its entry of factors (H,): their rows, or the norms' gains, which
        all heads share and so follow the smallest entry."""
        for W, norm in ((self.W_q, self.norm_q), (self.W_k, self.norm_k)):
            if isinstance(norm, RMSNorm) and norm.gain is not None:
                norm.gain.mul_(factors.min())
            else:
                W.scale_rows(factors.repeat_interleave(W.out_features // self.n_heads))


class AnGPTDecoder(Decoder):
    """The anGPT network. Initial values: every row of every matrix uniform on the sphere; α and s_z at `init`."""

    def __init__(self, vocab_size: int, d_model: int, blocks: list[AnGPTBlock], document_masking: bool,
                 s_z_init: float, s_z_scale: float, norms: Norms = "bounded") -> None:  # fmt: skip
        super().__init__(vocab_size, d_model, blocks, document_masking)
        self.norms = norms
        self.s_z = ScalingVector(vocab_size, s_z_init, s_z_scale)
        self.reset_parameters()

    def output(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        return h, self.s_z()

    def constrained(self) -> Iterator[nn.Parameter]:
        """Every matrix, embedding and head included; the bound holds for its rows, along the input axis."""
        return (weight for _, weight in self.matrices())

    def draw(self, name: str, weight: Tensor) -> None:
        draw_unit_vectors(weight, dim=1)

    def restore_norms(self) -> None:
        for name, weight in self.matrices():
            # The gates W_g start at 0 and so cannot have norm 1.
            restore = set_unit_norm if self.norms == "strict" and name != "W_g" else bound_norm
            restore(weight, dim=1)

    def row_norms(self) -> Iterator[Tensor]:
        return (torch.linalg.vector_norm(parameter.detach(), dim=1) for parameter in self.constrained())


class AnGPT(LanguageModel):
    """anGPT with its training settings.

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
        qk_norm: Normalise queries and keys per head, without a gain.
        norms: Rows bounded by norm 1 after each step, or set to it (an ablation).
        approximation: Deviations of the factors, for ablations.
        norm_eps: ε of the QK-norm.
        around: Gates and further norms around attention, QK-clip.
        dropout: Share dropped of the attention weights and of each block's two updates.
        alpha_init: Initial step size α of both residual updates; 1/n_layers if not given.
        alpha_scale: How fast α learns relative to the matrices; 1/√d_model if not given.
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
        norm_eps: float = 1e-6,
        around: AroundAttention = AroundAttention(),
        norms: Norms = "bounded",
        approximation: Approximation = Approximation(),
        dropout: float = 0.0,
        alpha_init: float | None = None,
        alpha_scale: float | None = None,
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
        alpha_init = 1 / n_layers if alpha_init is None else alpha_init
        alpha_scale = 1 / math.sqrt(d_model) if alpha_scale is None else alpha_scale
        s_z_scale = 1 / math.sqrt(d_model) if s_z_scale is None else s_z_scale
        positions = positions.for_context(context_length)
        with runtime.device():
            layers = attention_layers(attention, positions, backend, dropout, around, d_model, n_heads, n_layers)
            blocks = [
                AnGPTBlock(
                    d_model,
                    d_ff,
                    n_heads,
                    *layer,
                    qk_norm,
                    norm_eps,
                    dropout,
                    alpha_init,
                    alpha_scale,
                    around,
                    approximation,
                )
                for layer in layers
            ]
            self.model = AnGPTDecoder(self.vocab_size, d_model, blocks, document_masking, s_z_init, s_z_scale, norms)
