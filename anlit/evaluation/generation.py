"""Continuations of prompts, token by token, with a cache of keys and values.

Shorter prompts of a batch are padded on the left. Rows affect each other only through the order of
sums in matrix products.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule

from anlit.data.batch import TokenAt, document_ids
from anlit.errors import UserError
from anlit.nn.attention.cache import KeyValueCache
from anlit.nn.layers.positions import DynamicNTK
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.runtime import enough_memory


class Request(NamedTuple):
    """A request for a continuation of a prompt.

    Args:
        prompt: At least one token.
        sample: Number among the continuations of this prompt. It selects the random numbers.
    """

    prompt: Sequence[int]
    sample: int = 0


class Separator(NamedTuple):
    """The separator of documents. A continuation ends with its document.

    Args:
        token: The token that ends or begins a document; None if the vocabulary has no such token.
        at: Whether it is the last or the first token of its document, as in
            `anlit.data.batch.document_ids`.
    """

    token: int | None = None
    at: TokenAt = "end"


@dataclass
class Continuation:
    """The tokens generated so far for a request."""

    tokens: list[int] = field(default_factory=list)
    """Tokens before the stop token."""
    log_likelihood: list[float] = field(default_factory=list)
    """Log-likelihood of each token in nats, at temperature 1 over all tokens."""
    finish: str | None = None
    """`length`, `end_of_document`, or None while it is unfinished."""

    def add(self, token: int, log_likelihood: float, is_last: bool) -> None:
        self.tokens.append(token)
        self.log_likelihood.append(log_likelihood)
        self.finish = "length" if is_last else None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: Logits are divided by it; 0 takes the most probable token.
        top_k: Draw among this many of the most probable tokens; None for all.
        top_p: Draw among the fewest of these tokens that together have at least this probability.
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
                f"temperature {self.temperature:g} must be 0 (the most probable token) "
                "or a number above"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} must be 1 or more: leave it out to draw among all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p {self.top_p:g} must be a probability in (0, 1]: "
                "leave it out to draw among all"
            )
        if self.seed < 0:
            raise UserError(f"seed {self.seed} must be 0 or more")

    def uniforms(self, sample: int, n: int) -> Tensor:
        """Random numbers in [0, 1) for continuation `sample` of any prompt, (n,) float64.

        They depend only on the seed and `sample`, not on other prompts or rows of a batch.
        """
        return torch.from_numpy(np.random.default_rng((self.seed, sample)).random(n))

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draw a token per row, (B,) int64, by inverse transform sampling.

        Tokens are in order of probability. `logits` are (B, V), `uniform` (B,) in [0, 1).
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        n_candidates = logits.shape[-1] if self.top_k is None else min(self.top_k, logits.shape[-1])
        largest, tokens = logits.double().topk(n_candidates, dim=-1)
        probabilities = ((largest - largest[:, :1]) / self.temperature).softmax(-1)
        cumulative = probabilities.cumsum(-1)
        if self.top_p is not None:  # keep a token if the tokens before it do not make up top_p
            probabilities = probabilities.where(cumulative - probabilities < self.top_p, 0.0)
            cumulative = probabilities.cumsum(-1)
        thresholds = uniform[:, None].to(cumulative) * cumulative[:, -1:]
        index = torch.searchsorted(cumulative, thresholds, right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return tokens.gather(-1, torch.minimum(index, last))[:, 0]


OnToken = Callable[[int, int], None]
"""Called at once with the number of a request and its new token."""


def ignore_token(number: int, token: int) -> None:
    """Do nothing: the caller reads the continuations at their end."""


def generate(
    decoder: Decoder,
    requests: Sequence[Request],
    max_tokens: int,
    sampling: Sampling,
    separator: Separator = Separator(),
    batch_size: int = 8,
    n_allowed: int | None = None,
    on_token: OnToken = ignore_token,
    stop_tokens: Collection[int] = (),
) -> list[Continuation]:
    """Continue every request by at most `max_tokens` tokens.

    All ranks of a sharded decoder call this together, and return the same tokens.

    Args:
        decoder: The network, in eval mode.
        requests: Continued `batch_size` at a time, in this order.
        separator: Its token ends a continuation, and separates documents inside a prompt.
        n_allowed: Draw only tokens below this. Tokens that round a vocabulary up have no text.
        on_token: Gets each new token.
        stop_tokens: Further tokens that end a continuation, but no document inside a prompt.

    Raises:
        UserError: A prompt is empty, or has a token outside the vocabulary. A batch does not fit
            into memory. The logits are not finite.
    """
    vocabulary = decoder.embedding.num_embeddings
    for request in requests:
        check_prompt(request.prompt, vocabulary)
    end_tokens = {separator.token, *stop_tokens}
    continuations = [Continuation() for _ in requests]
    # gloo cannot write what ranks exchange into tensors of the inference mode.
    is_sharded = isinstance(decoder, FSDPModule)
    if positions_depend_on_length(decoder):
        batch_size = 1  # each prompt has positions of its own
    with torch.no_grad() if is_sharded else torch.inference_mode():
        for first in range(0, len(requests), batch_size):
            numbers = range(len(requests))[first : first + batch_size]
            prompts = [requests[number].prompt for number in numbers]
            samples = [requests[number].sample for number in numbers]
            batch = _Batch(decoder, prompts, max_tokens, separator)
            uniforms = torch.stack([sampling.uniforms(sample, max_tokens) for sample in samples])
            for step in range(max_tokens):
                allowed_logits = check_finite(batch.logits[:, :n_allowed])
                tokens = sampling.draw(allowed_logits, uniforms[:, step].to(batch.logits.device))
                if is_sharded:
                    distributed.broadcast(tokens, 0)  # or ranks could end at different steps
                all_log_likelihoods = batch.logits.double().log_softmax(-1)
                log_likelihoods = all_log_likelihoods.gather(-1, tokens[:, None])[:, 0].tolist()
                is_last = step + 1 == max_tokens
                for number, token, log_likelihood in zip(
                    numbers, tokens.tolist(), log_likelihoods, strict=True
                ):
                    continuation = continuations[number]
                    if continuation.finish is not None:
                        continue
                    if token in end_tokens:
                        continuation.finish = "end_of_document"
                    else:
                        continuation.add(token, log_likelihood, is_last)
                        on_token(number, token)
                if all(continuations[number].finish for number in numbers):
                    break
                batch.append(tokens)
    return continuations


def check_prompt(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise UserError for a prompt that a model of `vocabulary` tokens cannot read."""
    if not len(tokens):
        raise UserError("the prompt is empty: give at least one token of text to continue")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise UserError(
                f"the prompt has the token {token}, but the model knows 0 to {vocabulary - 1} "
                "only: give the tokenizer that it was trained with, or other tokens"
            )


def positions_depend_on_length(decoder: Decoder) -> bool:
    """Whether a longer sequence may have other positions at the same tokens (`DynamicNTK`)."""
    return any(isinstance(module, DynamicNTK) for module in decoder.modules())


class _Batch:
    """Prompts that are continued together, with their cache."""

    logits: Tensor
    """The logits of the next token, (B, V)."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        separator: Separator,
    ) -> None:
        self.decoder = decoder
        device = decoder.embedding.weight.device
        width = max(map(len, prompts))
        # The last column stands for the continuation.
        rows = np.full((len(prompts), width + 1), 0)
        ids = np.zeros_like(rows)
        padding = [width - len(prompt) for prompt in prompts]
        for row, row_ids, prompt, n_padding in zip(rows, ids, prompts, padding, strict=True):
            row[n_padding:] = [*prompt, -1]
            if separator.token is not None:
                row_ids[n_padding:] = document_ids(
                    row[None, n_padding:], separator.token, separator.at
                )
        self.document_ids = None  # every row is one document
        if ids.any():
            self.document_ids = torch.from_numpy(ids).to(device)
        cache_padding = torch.tensor(padding, device=device) if any(padding) else None
        self.cache = KeyValueCache(width + max_tokens, cache_padding)
        ids_of_prompts = None if self.document_ids is None else self.document_ids[:, :-1]
        self._forward(torch.from_numpy(rows[:, :-1]).to(device), ids_of_prompts)

    def append(self, tokens: Tensor) -> None:
        """Append a token to every row, (B,), and compute the logits of the next tokens."""
        ids = None if self.document_ids is None else self.document_ids[:, -1:]
        self._forward(tokens[:, None], ids)

    def _forward(self, tokens: Tensor, ids: Tensor | None) -> None:
        """Read tokens (B, Q) with their document ids, (B, Q) or None."""
        advice = "set a smaller --batch_size or --max_tokens, or give a shorter prompt"
        with enough_memory(
            len(tokens), self.cache.n_filled + tokens.shape[1], tokens.device, advice
        ):
            self.logits = self.decoder(tokens, ids, cache=self.cache, n_logits=1)[:, 0]


def check_finite(logits: Tensor) -> Tensor:
    """Return the logits; raise UserError if any is NaN or infinite."""
    if not logits.isfinite().all():
        raise UserError(
            "the model's logits are not finite, so its weights are damaged: "
            "choose another checkpoint"
        )
    return logits
