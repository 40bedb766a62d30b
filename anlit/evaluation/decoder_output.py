"""A decoder that computes fewer logits: (B, T, V) of many thousands of tokens would not fit into memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def replaced_logits(decoder: Any, of_hidden: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the decoder return `of_hidden` of its last hidden states (B, T, d), in place of all their logits."""
    decoder.logits = of_hidden
    try:
        yield
    finally:
        del decoder.logits
