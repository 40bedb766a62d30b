"""How a model's blocks are run, which changes time and memory but no result: compiled, recomputed, drawn late."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Execution:
    """Settings of how the blocks are run.

    Args:
        compile: Whether to compile each block with torch.compile. All blocks of a kind share one compilation.
        recompute_every: Activation checkpointing: recompute every n-th block in the backward pass instead of keeping
            what it computed; 1 recomputes all, 0 none.
        meta_init: Draw the initial weights only after they are sharded, for models that one device or the host cannot
            hold as often as it has ranks. They are the same weights.
    """

    compile: bool = False
    recompute_every: int = 0
    meta_init: bool = False

    def __post_init__(self) -> None:
        if self.recompute_every < 0:
            raise ValueError(f"execution.recompute_every must not be negative, but is {self.recompute_every}")

    def device(self) -> AbstractContextManager[Any]:
        """Where the network is built."""
        return torch.device("meta") if self.meta_init else nullcontext()

    def apply(self, blocks: Iterable[nn.Module]) -> None:
        """Prepare the blocks, before they are sharded.

        Their `forward` is replaced and not the module: names in checkpoints stay, and what sharding hooks around a
        block's call stays outside of what is compiled or recomputed.
        """
        for number, block in enumerate(blocks):
            if self.compile:
                block.forward = torch.compile(block.forward, dynamic=False)
            if self.recompute_every and number % self.recompute_every == 0:
                block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, use_reentrant=False)

    return run
