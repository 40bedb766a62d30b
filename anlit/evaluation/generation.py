"""Continuations of prompts, token by token, with a cache of keys and values.

Shorter prompts of a batch are padded on the left. A row depends on the others only through the order of sums in matrix
products.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anlit.data.batch import TokenAt, document_ids
from anlit.errors import UserError
from anlit.nn.attention.cache import KeyValueCache
from anlit.nn.layers.positions import DynamicNTK
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.runtime import enough_memory


class Request(NamedTuple):
    """A request for one continuation of a prompt of at least one token.

    `sample` is its number among several continuations of this prompt; it chooses the random numbers.
    """

    prompt: Sequence[int]
    sample: int = 0


class Ending(NamedTuple):
    """What separates documents; a continuation ends with its document.

    Args:
        token: The token that ends or begins a document; None if the vocabulary has no such token.
        at: Whether it is the last or the first token of its document, as in `anlit.data.batch.document_ids`.
    """

    token: int | None = None
    at: TokenAt = "end"


@dataclass
class Continuation:
    """The tokens generated so far for one request."""

    tokens: list[int] = field(default_factory=list)
    """Without the token at which it stopped."""
    log_likelihood: list[float] = field(default_factory=list)
    """Log-likelihood of each token under the model (temperature 1, all tokens), in nats."""
    finish: str | None = None
    """`length`, `end_of_document`, or None while it is unfinished."""


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
            raise UserError(
                f"--temperature {self.temperature:g} must be 0 (the most probable token) or a number above"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                f"--top_p {self.top_p:g} must be a probability in (0, 1]: leave it out to draw among all"
            )

    def uniforms(self, sample: int, n: int) -> Tensor:
        """(n,) float64 random numbers in [0, 1) for the tokens of continuation number `sample` of any prompt.

        They depend only on the seed and `sample`, not on other prompts or other rows of a batch.
        """
        return torch.from_numpy(np.random.default_rng((self.seed, sample)).random(n))

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """One token per row, (B,) int64, by inverse transform sampling over tokens in order of probability.

        `logits` are (B, V); `uniform` (B,) in [0, 1).
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
        index = torch.searchsorted(
            cumulative, uniform[:, None].to(cumulative) * cumulative[:, -1:], right=True
        )
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, torch.minimum(index, last))[:, 0]


@torch.inference_mode()
def generate(
    decoder: Decoder,
    requests: Sequence[Request],
    max_tokens: int,
    sampling: Sampling,
    ending: Ending = Ending(),
    batch_size: int = 8,
    n_allowed: int | None = None,
    on_token: Callable[[int, int], None] = lambda number, token: None,
    stop_tokens: Collection[int] = (),
) -> list[Continuation]:
    """Continue every request by at most `max_tokens` tokens.

    Args:
        decoder: The network, in eval mode.
        requests: Continued `batch_size` at a time, in this order.
        n_allowed: Draw only tokens below this; the other tokens of a rounded-up vocabulary have no text.
        on_token: Called at once with the number of the request and its new token.
        stop_tokens: Further tokens that end a continuation, and no document inside a prompt.

    Raises:
        UserError: A prompt is empty or has a token outside the vocabulary, a batch does not fit into memory, or the
            logits are not finite.
    """
    vocabulary = decoder.embedding.num_embeddings
    for request in requests:
        check_prompt(request.prompt, vocabulary)
    continuations = [Continuation() for _ in requests]
    for numbers in _batches(decoder, requests, max_tokens, batch_size):
        batch = _Batch(decoder, [requests[number].prompt for number in numbers], max_tokens, ending)
        uniforms = torch.stack(
            [sampling.uniforms(requests[number].sample, max_tokens) for number in numbers]
        )
        for step in range(max_tokens):
            tokens = sampling.draw(
                finite(batch.logits[:, :n_allowed]), uniforms[:, step].to(batch.logits.device)
            )
            chances = (
                batch.logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()
            )
            for number, token, chance in zip(numbers, tokens.tolist(), chances, strict=True):
                continuation = continuations[number]
                if continuation.finish is not None:
                    continue
                if token == ending.token or token in stop_tokens:
                    continuation.finish = "end_of_document"
                else:
                    continuation.tokens.append(token)
                    continuation.log_likelihood.append(chance)
                    on_token(number, token)
                    continuation.finish = "length" if step + 1 == max_tokens else None
            if all(continuations[number].finish for number in numbers):
                break
            batch.read(tokens[:, None])
    return continuations


def check_prompt(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise UserError for a prompt that a model of `vocabulary` tokens cannot read."""
    if not len(tokens):
        raise UserError("the prompt is empty: give at least one token of text to continue")
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise UserError(
            f"the prompt has the token {wrong}, but the model knows 0 to {vocabulary - 1} only: "
            "give the tokenizer that it was trained with, or other tokens"
        )


def stretches(decoder: Decoder, length: int) -> bool:
    """Whether the positions of a sequence of `length` tokens differ from those of a shorter one (`DynamicNTK`)."""
    kinds = (module for module in decoder.modules() if isinstance(module, DynamicNTK))
    return any(length > (kind.training_length or 0) for kind in kinds)


def _batches(
    decoder: Decoder, requests: Sequence[Request], max_tokens: int, batch_size: int
) -> Iterator[Sequence[int]]:
    """Numbers of the requests in each batch. If positions depend on the length, its prompts have one length."""

    def kind(number: int) -> int:
        length = len(requests[number].prompt) + max_tokens
        return length if stretches(decoder, length) else 0

    for _, group in groupby(range(len(requests)), kind):
        while numbers := list(islice(group, batch_size)):
            yield numbers


class _Batch:
    """Rows that are continued together: their cache, and the logits of the next token, (B, V)."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, ending: Ending
    ) -> None:
        self.decoder = decoder
        device = decoder.embedding.weight.device
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        rows = np.stack(
            [np.pad([*prompt, -1], (n, 0)) for prompt, n in zip(prompts, padding, strict=True)]
        )
        ids = np.zeros_like(rows)  # the last is that of the continuation
        if ending.token is not None:
            for own, row, n in zip(ids, rows, padding, strict=True):
                own[n:] = document_ids(row[None, n:], ending.token, ending.at)
        self.ids = (
            torch.from_numpy(ids).to(device) if ids.any() else None
        )  # None: a document per row
        self.cache = KeyValueCache(
            width + max_tokens, torch.tensor(padding, device=device) if any(padding) else None
        )
        self.read(torch.from_numpy(rows[:, :-1]).to(device), slice(-1))

    def read(self, tokens: Tensor, columns: slice = slice(-1, None)) -> None:
        """Read (B, Q) tokens, those of the prompts or one more of each continuation."""
        ids = None if self.ids is None else self.ids[:, columns]
        advice = "set a smaller --batch_size or --max_tokens, or give a shorter prompt"
        with enough_memory(len(tokens), self.cache.n_read + tokens.shape[1], tokens.device, advice):
            self.logits = self.decoder(tokens, ids, cache=self.cache, n_logits=1)[:, 0]


def finite(logits: Tensor) -> Tensor:
    """The logits; raise UserError if one is NaN or infinite."""
    if not logits.isfinite().all():
        raise UserError(
            "the model's logits are not finite, so its weights are damaged: choose another checkpoint"
        )
    return logits
