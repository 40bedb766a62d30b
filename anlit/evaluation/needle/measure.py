"""Scores of a model on needles in haystacks: exact match and the log-likelihood of the answers.

Exact match means that greedy decoding after the question gives the 7 digits, in the tokens of the tokenizer. This needs
no decoding: greedy decoding gives the answer if and only if each of its tokens is the argmax given the question and the
answer's tokens before it. So one forward pass over the sample with its answer is enough. (Other tokens that spell the
same digits are no match; a tokenizer writes a number in one way.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anlit.data.needle import EVALUATION, Haystack, Sample
from anlit.data.order.blocks import generator
from anlit.errors import UserError
from anlit.models.language_model import LanguageModel

BATCH_TOKENS = 1 << 14
"""Tokens in a forward pass, unless one sample is longer."""


def measure(
    model: LanguageModel,
    haystack: Haystack,
    length: int,
    depths: Sequence[float],
    n_samples: int,
    seed: int,
    advance: Callable[[int], None] = lambda n: None,
) -> dict[str, Any]:
    """Score `n_samples` samples of `length` tokens at each depth.

    Sample j at depth number i depends only on `seed`, the length, i and j. So all models with one tokenizer get the
    same samples.

    Args:
        haystack: The text to hide needles in.
        length: Tokens in a sample.
        depths: The depths, from 0 to 1.
        advance: Called after each forward pass with its number of samples.

    Returns:
        {length, accuracy, nats_per_token, by_depth}: the share of exact matches, and the log-likelihood of the answers
        per token. `by_depth` has, for each depth, {depth, mean_depth, matches, samples, nats_per_token}; `mean_depth`
        is that of the needles, which stand at the end of a sentence nearby.

    Raises:
        UserError: Such samples cannot be made, or a forward pass does not fit into the device's memory.
    """
    haystack.check(length)
    device = next(model.parameters()).device
    places = [(i, j) for i in range(len(depths)) for j in range(n_samples)]
    at_once = max(1, BATCH_TOKENS // length)
    scores: list[tuple[float, bool, float, int]] = []  # depth, match, log-likelihood, tokens of the answer
    for first in range(0, len(places), at_once):
        randoms = [(i, generator(seed, EVALUATION, length, (i << 32) + j)) for i, j in places[first : first + at_once]]
        samples = [haystack.sample(length, depths[i], random, held_out=True) for i, random in randoms]
        matches, values = (each.tolist() for each in score(model, samples, device))
        for sample, match, value in zip(samples, matches, values, strict=True):
            scores.append((sample.depth, match, value, sample.n_answer))
        advance(len(samples))
    depth, match, log_likelihood, n_answer = (
        np.array(values).reshape(len(depths), n_samples) for values in zip(*scores, strict=True)
    )
    return {
        "length": length,
        "accuracy": float(match.mean()),
        "nats_per_token": float(log_likelihood.sum() / n_answer.sum()),
        "by_depth": [
            {
                "depth": float(asked),
                "mean_depth": float(depth[i].mean()),
                "matches": int(match[i].sum()),
                "samples": n_samples,
                "nats_per_token": float(log_likelihood[i].sum() / n_answer[i].sum()),
            }
            for i, asked in enumerate(depths)
        ],
    }


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
