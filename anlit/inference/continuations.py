"""Log-likelihoods of continuations of contexts, for multiple-choice tasks. Each context is read once.

A batch of contexts is padded on the left, and their keys and values are cached. The cache rows of each context are then
copied for its continuations. The longest contexts come first, so memory runs out at once or not at all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anlit.attention.cache import KeyValueCache
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.inference.generation import Ending, check_prompt, stretches
from anlit.models.decoder import Decoder


class Pair(NamedTuple):
    """A context and its continuation, each at least one token."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The score of a continuation."""

    log_likelihood: float
    """In nats, summed over its tokens."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one."""


class _Group(NamedTuple):
    """Pairs of one context, which is cut on the left so that the longest sequence fits."""

    context: tuple[int, ...]
    pairs: list[tuple[int, tuple[int, ...]]]
    """The number of each pair, and its continuation."""


@torch.inference_mode()
def score_continuations(
    decoder: Decoder,
    pairs: Sequence[Pair],
    max_length: int,
    batch_size: int = 32,
    ending: Ending = Ending(),
    tell: Callable[[int], None] = lambda n: None,
) -> list[Score]:
    """The scores of `pairs`, in their order.

    Args:
        decoder: The network, in eval mode.
        pairs: What to score.
        max_length: The most tokens that the model reads; of longer sequences the first tokens are left out.
        batch_size: Continuations in a batch. It does not change the scores.
        ending: The token that separates documents; with document masking, text before it is not seen after it.
        tell: Called with the number of pairs that were scored since the last call.

    Raises:
        UserError: A pair is empty or has a token outside the vocabulary, a continuation is longer than `max_length`,
            the logits are not finite, or memory does not suffice.
    """
    found: list[Score | None] = [None] * len(pairs)
    for batch in _batches(_groups(decoder, pairs, max_length), batch_size, stretches(decoder, 2 * max_length)):
        try:
            scores = _score(decoder, batch, max_length, ending)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{batch_size} continuations of contexts of {len(batch[0].context)} tokens do not fit the memory: set "
                "a smaller --batch_size or --length"
            ) from error
        for (number, _), score in zip((pair for group in batch for pair in group.pairs), scores, strict=True):
            found[number] = score
        tell(len(scores))
    return [score for score in found if score is not None]


def _groups(decoder: Decoder, pairs: Sequence[Pair], max_length: int) -> list[_Group]:
    """Pairs by context, the longest context first."""
    vocabulary = decoder.embedding.num_embeddings
    groups: dict[tuple[int, ...], _Group] = {}
    for number, (context, continuation) in enumerate(pairs):
        check_prompt(context, vocabulary)
        check_prompt(continuation, vocabulary)
        room = max_length + 1 - len(continuation)  # the last token is not an input
        if room < 1:
            raise UserError(
                f"a continuation of {len(continuation)} tokens does not fit {max_length}: set --length to more"
            )
        key = tuple(context[-room:])
        groups.setdefault(key, _Group(key, [])).pairs.append((number, tuple(continuation)))
    return sorted(groups.values(), key=lambda group: -len(group.context))


def _batches(groups: list[_Group], batch_size: int, one_context: bool) -> Iterator[list[_Group]]:
    """Batches of groups with at most `batch_size` pairs; larger groups are divided.

    Args:
        groups: In order.
        batch_size: At least 1.
        one_context: One context per batch, because the batch's width would change the positions (`DynamicNTK`).
    """
    batch: list[_Group] = []
    n_pairs = 0
    for context, pairs in groups:
        for first in range(0, len(pairs), batch_size):
            part = _Group(context, pairs[first : first + batch_size])
            if batch and (one_context or n_pairs + len(part.pairs) > batch_size):
                yield batch
                batch, n_pairs = [], 0
            batch.append(part)
            n_pairs += len(part.pairs)
    if batch:
        yield batch


def _score(decoder: Decoder, batch: list[_Group], max_length: int, ending: Ending) -> list[Score]:
    """The scores of a batch's pairs, group by group."""
    device = decoder.embedding.weight.device
    width = max(len(group.context) for group in batch)
    longest = max(len(continuation) for group in batch for _, continuation in group.pairs)
    padding = torch.tensor([width - len(group.context) for group in batch])
    cache = KeyValueCache(max(max_length, width + longest - 1), padding.to(device) if padding.any() else None)
    before = np.stack([np.pad(group.context, (width - len(group.context), 0)) for group in batch])
    continuations = [continuation for group in batch for _, continuation in group.pairs]
    owners = np.repeat(np.arange(len(batch)), [len(group.pairs) for group in batch])
    after = np.stack([np.pad(tokens[:-1], (0, longest - len(tokens))) for tokens in continuations]).astype(np.int64)
    ids_before, ids_after = _documents(before, after, owners, padding.tolist(), ending)

    first = decoder(_tensor(before, device), _tensor(ids_before, device), cache=cache, n_logits=1)
    logits = first[torch.as_tensor(owners, device=device)]
    if longest > 1:
        cache.select(torch.as_tensor(owners, device=device))
        rest = decoder(_tensor(after, device), _tensor(ids_after, device), cache=cache)
        logits = torch.cat((logits, rest), 1)
    return _scores_of(logits, continuations)


def _documents(
    before: np.ndarray, after: np.ndarray, owners: np.ndarray, padding: list[int], ending: Ending
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Document ids of contexts and continuations; None if they have no separator."""
    if ending.token is None or not ((before == ending.token).any() or (after == ending.token).any()):
        return None, None
    ids_before = np.zeros_like(before)
    ids_after = np.zeros_like(after)
    width = before.shape[1]
    for row, owner in enumerate(owners):
        tokens = np.concatenate((before[owner, padding[owner] :], after[row]))
        ids = document_ids(tokens[None], ending.token, ending.at)[0]
        ids_before[owner, padding[owner] :] = ids[: width - padding[owner]]
        ids_after[row] = ids[width - padding[owner] :]
    return ids_before, ids_after


def _tensor(rows: np.ndarray | None, device: torch.device) -> Tensor | None:
    return None if rows is None else torch.from_numpy(rows.astype(np.int64)).to(device)


def _scores_of(logits: Tensor, continuations: list[tuple[int, ...]]) -> list[Score]:
    """The scores from logits (R, n, V), which predict each continuation's tokens and then its padding."""
    longest = logits.shape[1]
    targets = np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens in continuations]).astype(np.int64)
    counted = torch.arange(longest) < torch.tensor([len(tokens) for tokens in continuations])[:, None]
    index = torch.from_numpy(targets).to(logits.device)[..., None]
    logits = logits.float()
    chances = (logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True))[..., 0].cpu().double()
    if not chances[counted].isfinite().all():
        raise UserError("the model's logits are not finite, so its weights are damaged: choose another checkpoint")
    right = (logits.argmax(-1, keepdim=True) == index)[..., 0].cpu()
    sums, greedy = chances.where(counted, 0).sum(1).tolist(), (right | ~counted).all(1).tolist()
    return [Score(*score) for score in zip(sums, greedy, strict=True)]
