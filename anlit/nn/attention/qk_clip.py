"""QK-clip (arXiv 2507.20534): shrinks queries and keys after a step with too large a score."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anlit.nn.layers.linear import ScaledLinear
from anlit.nn.layers.norms import RMSNorm


class QKClip(nn.Module):
    """Remembers each head's largest score q·k/√D since the last optimizer step.

    It may be `threshold` at most.
    """

    def __init__(self, threshold: float, n_heads: int) -> None:
        super().__init__()
        self.threshold = threshold
        self.largest: Tensor
        self.register_buffer("largest", torch.empty(n_heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the scores of earlier steps."""
        self.largest.fill_(float("-inf"))

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        """scores: (B, H, queries, keys), −∞ where a key is not visible."""
        self.largest.copy_(torch.maximum(self.largest, scores.amax((0, 2, 3)).to(self.largest)))

    @staticmethod
    @torch.no_grad()
    def factors(clips: "Sequence[QKClip]") -> list[Tensor]:
        """√min(1, threshold/largest) per head, the factor of q and of k: (H,) for each layer.

        Resets `largest`.

        With several ranks `largest` is the maximum over ranks, from one all-reduce for all layers.
        """
        largest = torch.stack([clip.largest for clip in clips])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        factors = []
        for clip, score in zip(clips, largest, strict=True):
            factors.append((score / clip.threshold).clamp_min(1).rsqrt())
            clip.reset_parameters()
        return factors


@torch.no_grad()
def shrink(
    queries: tuple[ScaledLinear, nn.Module], keys: tuple[ScaledLinear, nn.Module], factors: Tensor
) -> None:
    """Multiply the scores of head i by the square of factors[i], (H,), in (0, 1].

    `queries` and `keys` are W_q and W_k, each with the norm that follows it. A gain of this norm is
    multiplied instead of W's rows. All heads share the gain, so it takes the smallest factor.
    """
    n_kv_heads = len(factors) * keys[0].out_features // queries[0].out_features
    # Heads share a key: its factor is the largest of theirs, and the queries take up the
    # difference.
    key_factors = factors.unflatten(0, (n_kv_heads, -1)).amax(1)
    shared_factors = key_factors.repeat_interleave(len(factors) // n_kv_heads)
    query_factors = factors.square() / shared_factors
    _scale_heads(*queries, query_factors, gain_factor=factors.min())
    _scale_heads(*keys, key_factors, gain_factor=factors.min())


def _scale_heads(
    linear: ScaledLinear, norm: nn.Module, factors: Tensor, gain_factor: Tensor
) -> None:
    """Multiply the norm's gain, if it has a gain, by `gain_factor`, else each head's rows."""
    if isinstance(norm, RMSNorm) and norm.gain is not None:
        norm.gain.mul_(gain_factor)
    else:
        linear.scale_rows(factors.repeat_interleave(linear.out_features // len(factors)))
