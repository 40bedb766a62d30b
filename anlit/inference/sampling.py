"""Draws the next token from logits, with temperature, top k, top p and a seed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anlit.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: Logits are divided by it; 0 takes the most probable token.
        top_k: Draw among this many of the most probable tokens; None for all.
        top_p: Of these, draw among the fewest most probable ones that together have at least this probability.
        seed: Seed of the random numbers.

    Raises:
        UserError: A number is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature:g} must be 0 (the most probable token) or a number above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top_k {self.top_k} must be at least 1 token: leave it out to draw among all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top_p {self.top_p:g} must be a probability in (0, 1]: leave it out to draw among all")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed} must not be negative")

    def uniforms(self, sample: int, n: int) -> Tensor:
        """(n,) float64 random numbers in [0, 1) for the tokens of continuation number `sample` of any prompt.

        They depend only on the seed and `sample`, not on other prompts or other rows of a batch.
        """
        return torch.from_numpy(np.random.default_rng((self.seed, sample)).random(n))

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """One token per row, (B,) int64, by inverse transform sampling over tokens in order of probability.

        Args:
            logits: (B, V).
            uniform: (B,) in [0, 1).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        n_candidates = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        largest, tokens = logits.double().topk(n_candidates, dim=-1)
        probabilities = ((largest - largest[:, :1]) / self.temperature).softmax(-1)
        cumulative = probabilities.cumsum(-1)
        if self.top_p is not None:  # a token stays if those before it do not make up p
            probabilities = probabilities.where(cumulative - probabilities < self.top_p, 0.0)
            cumulative = probabilities.cumsum(-1)
        index = torch.searchsorted(cumulative, uniform[:, None].to(cumulative) * cumulative[:, -1:], right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, torch.minimum(index, last))[:, 0]
