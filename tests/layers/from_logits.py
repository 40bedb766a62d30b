"""The loss in its plain form, from all logits."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.targets import IGNORED


def next_token_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of logits (B, T, V) in nats per counted token, and the same plus z_loss · mean(log Z)²."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    counted = targets != IGNORED
    n_counted = counted.sum().clamp_min(1)  # no target at all: a loss of 0, not NaN
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / n_counted
    if not z_loss:
        return loss, loss
    squares = logits.logsumexp(-1).square()
    return loss, loss + z_loss * torch.where(counted, squares, 0).sum() / n_counted
