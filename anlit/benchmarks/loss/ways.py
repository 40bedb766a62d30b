"""One way to compute the vocabulary projection with its cross-entropy, measured in a process of its own."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.benchmarks.peers.clock import peak_bytes, seconds_of
from anlit.benchmarks.peers.serve import serve
from anlit.layers.cross_entropy import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Any]

EXAMPLES = 4096
"""Numbers of each gradient that are compared: its first, spread over all of it."""


def full(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The usual way: all logits, in float32 for the softmax."""
    return cross_entropy((h @ weight.mT).flatten(0, -2).float(), targets.flatten())


def of_torch(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own chunked one, from 2.13."""
    from torch.nn import LinearCrossEntropyOptions, functional  # type: ignore[attr-defined]

    loss: Any = functional.linear_cross_entropy  # type: ignore[attr-defined]
    return loss(h.flatten(0, -2), weight, targets.flatten(), options=LinearCrossEntropyOptions())  # type: ignore[no-any-return]


WAYS: dict[str, Loss] = {"full": full, "anlit": linear_cross_entropy, "torch": of_torch}
"""Functions of h (B, T, d), weight (V, d), targets (B, T) to the loss, or several of which the last has gradients."""


def measure(
    way: str, batch: int, length: int, width: int, vocab_size: int, device: str, dtype: str, threads: int
) -> dict[str, Any]:
    """Loss, gradients, bytes at the peak beside h and W (their gradients are counted), seconds.

    In bfloat16 under autocast, h in bfloat16 and W in float32, as in training.
    """
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    where, low = torch.device(device), dtype == "bfloat16"
    h = torch.randn(batch, length, width, device=where).to(torch.bfloat16 if low else torch.float32).requires_grad_()
    weight = (torch.randn(vocab_size, width, device=where) * width**-0.5).requires_grad_()
    targets = torch.randint(vocab_size, (batch, length), device=where)
    found = math.nan

    def step(n_rows: int = batch, n_tokens: int = length) -> None:
        nonlocal found
        h.grad = weight.grad = None
        with torch.autocast(where.type, torch.bfloat16, enabled=low):
            result = WAYS[way](h[:n_rows, :n_tokens], weight, targets[:n_rows, :n_tokens])
        loss = result[-1] if isinstance(result, tuple) else result
        loss.backward()
        found = loss.item()

    step(1, 8)  # what libraries take once
    peak = peak_bytes(step, (), where)
    seconds = min(seconds_of(step, where) for _ in range(5 if where.type == "cuda" else 1))
    assert h.grad is not None
    assert weight.grad is not None
    examples = [_examples(gradient) for gradient in (h.grad, weight.grad)]
    return {"loss": found, "peak_bytes": peak, "seconds": seconds, "gradients": examples}


def _examples(gradient: Tensor) -> list[float]:
    flat = gradient.flatten()
    return [float(value) for value in flat[:: max(1, flat.numel() // EXAMPLES)].float()]


if __name__ == "__main__":
    serve({"measure": measure})
