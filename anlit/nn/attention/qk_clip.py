"""QK-clip (arXiv 2507.20534): brings attention scores q·k/√D back below a threshold.

During a step each head's largest score is recorded. After the step, a head with a score over the
threshold gets smaller W_q and W_k. Its scores are multiplied by threshold/largest.

Shape letters: B batch, H heads of queries, G heads of keys. Each key is shared by H/G heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anlit.nn.layers.linear import ScaledLinear
from anlit.nn.layers.norms import RMSNorm


class QKClip(nn.Module):
    """Remembers each head's largest score q·k/√D since the last optimizer step, for one layer.

    Args:
        threshold: The largest score that is left alone.
        n_heads: H.
    """

    def __init__(self, threshold: float, n_heads: int) -> None:
        super().__init__()
        self.threshold = threshold
        self.largest: Tensor
        # (H,). It is not saved: checkpoints come between steps, when it is empty.
        self.register_buffer("largest", torch.empty(n_heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the scores of earlier steps."""
        self.largest.fill_(float("-inf"))

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        """Take the maximum with scores (B, H, queries, keys), −∞ where a key is not visible."""
        self.largest.copy_(torch.maximum(self.largest, scores.amax((0, 2, 3)).to(self.largest)))

    @staticmethod
    @torch.no_grad()
    def factors(clips: "Sequence[QKClip]") -> list[Tensor]:
        """√min(1, threshold/largest), (H,) for each layer, and reset `largest`.

        The factor is for q and for k. So scores get its square. `largest` is the maximum over
        ranks, by an all-reduce for all layers. Every rank must call this.
        """
        largest = torch.stack([clip.largest for clip in clips])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        factors = []
        for clip, score in zip(clips, largest, strict=True):
            # √(threshold/largest), at most 1; 1 also for −∞, if nothing was observed.
            factors.append((score / clip.threshold).clamp_min(1).rsqrt())
            clip.reset_parameters()
        return factors


@torch.no_grad()
def shrink(
    queries: tuple[ScaledLinear, nn.Module], keys: tuple[ScaledLinear, nn.Module], factors: Tensor
) -> None:
    """Multiply the scores of head i by the square of factors[i], (H,), in (0, 1].

    `queries` and `keys` are W_q and W_k, each with the norm that follows it. A norm with a gain
    would undo a change of W's rows. So the gain is multiplied instead. All heads share the gain. It
    takes the smallest factor, and heads below the threshold shrink too.
    """
    n_kv_heads = len(factors) * keys[0].out_features // queries[0].out_features
    # H/G heads share a key. Its factor is the largest of theirs, and each query's factor takes up
    # the difference, so that every head's product is the square of its own factor.
    key_factors = factors.unflatten(0, (n_kv_heads, -1)).amax(1)  # (G,)
    shared_factors = key_factors.repeat_interleave(len(factors) // n_kv_heads)  # (H,)
    query_factors = factors.square() / shared_factors  # (H,)
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
