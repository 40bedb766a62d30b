"""Scores of a model on needles in haystacks: exact match and the log-likelihood of the answers.

Exact match means that greedy decoding after the question gives the 7 digits, in the tokens of the tokenizer. This needs
no decoding: greedy decoding gives the answer if and only if each of its tokens is the argmax given the question and the
answer's tokens before it. So one forward pass over the sample with its answer is enough. (Other tokens that spell the
same digits are no match; a tokenizer writes a number in one way.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anlit.data.order.blocks import generator
from anlit.errors import UserError
from anlit.evaluation.needle.haystack import Haystack, Sample
from anlit.models.language_model import LanguageModel

EVALUATION = 3
"""The stream of random numbers; training and validation have other streams."""
BATCH_TOKENS = 1 << 14
"""Tokens in a forward pass, unless one sample is longer."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one model at one length; arrays are (depths, samples)."""

    length: int
    asked: np.ndarray
    """(depths,) the requested depths."""
    depth: np.ndarray
    """The actual depths of the needles, at the end of a sentence nearby."""
    match: np.ndarray
    """Whether greedy decoding gives the number."""
    log_likelihood: np.ndarray
    """Log-likelihood of the answer given all tokens before it, in nats."""
    n_answer: np.ndarray
    """Tokens of the answer."""

    @property
    def accuracy(self) -> float:
        """Mean over depths and samples."""
        return float(self.match.mean())

    @property
    def nats_per_token(self) -> float:
        """Log-likelihood per token of the answers."""
        return float(self.log_likelihood.sum() / self.n_answer.sum())


def measure(
    model: LanguageModel,
    haystack: Haystack,
    length: int,
    depths: Sequence[float],
    n_samples: int,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
) -> Scores:
    """Score `n_samples` samples of `length` tokens at each depth.

    Sample j at depth number i depends only on `seed`, the length, i and j. So all models with one tokenizer get the
    same samples.

    Args:
        haystack: The text to hide needles in.
        length: Tokens in a sample.
        depths: The depths, from 0 to 1.
        advance: Called after each forward pass with its number of samples.

    Raises:
        UserError: Such samples cannot be made, or a forward pass does not fit into the device's memory.
    """
    haystack.check(length)
    device = next(model.parameters()).device
    cells = [(i, j) for i in range(len(depths)) for j in range(n_samples)]
    at_once = max(1, BATCH_TOKENS // length)
    found = []
    for first in range(0, len(cells), at_once):
        randoms = [(i, generator(seed, EVALUATION, length, (i << 32) + j)) for i, j in cells[first : first + at_once]]
        samples = [haystack.sample(length, depths[i], random, held_out=True) for i, random in randoms]
        match, log_likelihood = score(model, samples, device)
        found += list(zip(samples, match.tolist(), log_likelihood.tolist(), strict=True))
        advance(len(samples))

    def table(values: list) -> np.ndarray:
        return np.array(values).reshape(len(depths), n_samples)

    return Scores(
        length,
        np.array(depths, dtype=np.float64),
        table([sample.depth for sample, _, _ in found]),
        table([match for _, match, _ in found]),
        table([log_likelihood for _, _, log_likelihood in found]),
        table([sample.n_answer for sample, _, _ in found]),
    )


@torch.inference_mode()
def score(model: LanguageModel, samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """For samples of one length: (B,) whether the answer is matched, and (B,) its log-likelihood in nats."""
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    n_answer = torch.tensor([sample.n_answer for sample in samples], device=device)
    most = int(n_answer.max())
    try:
        logits = model.model(tokens[:, :-1], n_logits=most).float()  # (B, longest answer, V)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"A forward pass over {tokens.shape[0]} × {tokens.shape[1] - 1:,} tokens does not fit the memory of "
            f"{device}: leave the longest of --lengths out, or choose another --device"
        ) from error
    targets = tokens[:, -most:]
    counted = torch.arange(most, device=device) >= most - n_answer[:, None]
    match = ((logits.argmax(-1) == targets) | ~counted).all(-1)
    of_targets = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return match.cpu(), torch.where(counted, of_targets, 0).sum(-1).cpu()
