"""What stands around the attention kernel, each a setting: norms of q, k, v and of the output, gates, QK-clip."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from anlit.layers.linear import ScaledLinear

Gate = Literal["none", "per_head", "per_element"]


@dataclass(frozen=True)
class AroundAttention:
    """Settings around the kernel; as they are by default, nothing is added to the three architectures.

    The norms named here are the architecture's own kind: RMS with a learned gain in GPT+, the unit norm in nGPT and
    anGPT, whose heads have vectors of norm 1.

    Args:
        qk_gain: Whether QK-norm has a learned gain; by default GPT+'s and nGPT's (s_qk) has, anGPT's has none.
        qk_norm_eps: ε of the QK-norm, added to a mean square that is about 1 before it in nGPT and anGPT: one that is
            not small lets q and k keep some of their norm. By default norm_eps, in nGPT 0.
        qk_clip: After each optimizer step, shrink queries and keys where a head's largest score q·k/√D since the last
            step was over this (arXiv 2507.20534); null for never. It costs a second product q·kᵀ.
        v_norm: Normalise values per head too (QKV-norm, arXiv 2410.16682).
        output_norm: Normalise each head's average.
        gate: Multiply the averages by 2σ(W_g x), W_g starting at 0: one factor per head, or one per element
            (arXiv 2505.06708).
        post_norm: Normalise what W_o and W_d put out (peri-LN, arXiv 2502.02732); nGPT does so in any case.

    Raises:
        ValueError: A setting is out of range.
    """

    qk_gain: bool | None = None
    qk_norm_eps: float | None = None
    qk_clip: float | None = None
    v_norm: bool = False
    output_norm: bool = False
    gate: Gate = "none"
    post_norm: bool = False

    def __post_init__(self) -> None:
        if self.qk_norm_eps is not None and self.qk_norm_eps < 0:
            raise ValueError(f"around.qk_norm_eps must not be negative, but is {self.qk_norm_eps}")
        if self.qk_clip is not None and self.qk_clip <= 0:
            raise ValueError(
                f"around.qk_clip must be positive, but is {self.qk_clip}: give a score, such as 100, or null"
            )


class GateMap(ScaledLinear):
    """The map W_g of a gate; starts at 0, where every gate is 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class AttentionOutput(nn.Module):
    """From the heads' averages to the input of W_o: their norm, their gates, side by side.

    Args:
        d_model: d.
        n_heads: H.
        around: The settings.
        norm: Norm over the last axis, applied to each head's average if `around.output_norm`.
        gate_factor: Brings the gate's input x to a root mean square of 1: W_g x is this factor larger.
    """

    def __init__(
        self, d_model: int, n_heads: int, around: AroundAttention, norm: nn.Module, gate_factor: float
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = norm if around.output_norm else nn.Identity()
        outputs = {"none": 0, "per_head": n_heads, "per_element": d_model}[around.gate]
        self.W_g = GateMap(d_model, outputs, gate_factor) if outputs else None

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended (B, H, T, D), and the block's input to attention x (B, T, d) → (B, T, d)."""
        attended = self.norm(attended)
        if self.W_g is not None:
            gate = 2 * torch.sigmoid(self.W_g(x))  # (B, T, H) or (B, T, d)
            attended = attended * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return attended.transpose(1, 2).flatten(2)


class QKClip(nn.Module):
    """Remembers each head's largest score q·k/√D since the last optimizer step.

    Args:
        threshold: The score that none should exceed.
        n_heads: H.
    """

    def __init__(self, threshold: float, n_heads: int) -> None:
        super().__init__()
        self.threshold = threshold
        self.largest: Tensor
        self.register_buffer("largest", torch.empty(n_heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget what was observed."""
        self.largest.fill_(float("-inf"))

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        """scores: (B, H, queries, keys), −∞ where a key is not visible."""
        self.largest.copy_(torch.maximum(self.largest, scores.amax((0, 2, 3)).to(self.largest)))

    @staticmethod
    @torch.no_grad()
    def factors(clips: "Sequence[QKClip]") -> list[Tensor]:
        """√min(1, threshold/largest) per head for q and for k, (H,) for each layer; and forgets what was seen.

        With several ranks it is about what all of them observed, which one all-reduce tells for all layers together.
        """
        largest = torch.stack([clip.largest for clip in clips])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        for clip in clips:
            clip.reset_parameters()
        return [(mine / clip.threshold).clamp_min(1).rsqrt() for clip, mine in zip(clips, largest, strict=True)]
