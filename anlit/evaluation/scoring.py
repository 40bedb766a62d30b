"""Log-likelihoods of text, token by token, in windows if a document is longer than the context.

The first window of a document has its first `length` tokens. Each next window ends `stride` tokens
later and begins `length` tokens before its end. It scores only tokens that no earlier window has
scored. A token's context is the document before it, or at least `length − stride` tokens.
With stride = length every token is read once. With stride = 1 every context fills the window.

If the vocabulary has a separator of documents, the first token is scored after the separator alone.
The other tokens see the separator only if training texts did. They did if documents begin with it,
or are not masked. A text for an imported model begins with its tokenizer's special token, such as
Llama's `<s>`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.evaluation.generation import (
    Separator,
    check_finite,
    check_prompt,
    positions_depend_on_length,
)
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.runtime import enough_memory

MAX_TOKENS = 1 << 14
"""Tokens in a forward pass at most, unless a window has more."""
MAX_LOGITS = 1 << 27
"""Logits of a forward pass at most, 512 MiB in float32, unless a window has more."""


class Scores(NamedTuple):
    """The scores of a document's n tokens, in order; arrays of shape (n,).

    `scores_table.SCHEMA` describes the columns. A first token without context has a log-likelihood
    of NaN and a rank of 0.
    """

    tokens: np.ndarray
    log_likelihood: np.ndarray
    rank: np.ndarray
    n_context: np.ndarray


class Window(NamedTuple):
    """Inputs [begin, end) of a sequence. Inputs from `first` on predict the scored tokens."""

    begin: int
    first: int
    end: int


def split_into_windows(n_inputs: int, length: int, stride: int) -> Iterator[Window]:
    """Yield windows that together score the token after every input once."""
    first = 0
    while first < n_inputs:
        end = min(n_inputs, length if first == 0 else first + stride)
        yield Window(max(0, end - length), first, end)
        first = end


class _ScoredDocument:
    """A document that is being scored: its tokens with the separator, and the scores so far."""

    def __init__(self, tokens: Sequence[int], separator: Separator, is_one_document: bool) -> None:
        needs_separator = separator.token is not None and tokens[0] != separator.token
        self.n_prepended = 1 if needs_separator else 0
        self.row = np.array([separator.token, *tokens] if needs_separator else [*tokens])
        separator_token = -1 if separator.token is None else separator.token
        self.ids = document_ids(self.row[None], separator_token, separator.at)[0]
        if is_one_document:
            self.ids = np.minimum(self.ids, self.ids[self.n_prepended])
        self.n_inputs = len(self.row) - 1
        self.n_unscored = self.n_inputs
        self.scores = Scores(
            tokens=self.row[self.n_prepended :],
            log_likelihood=np.full(len(tokens), np.nan, np.float32),
            rank=np.zeros(len(tokens), np.int32),
            n_context=np.zeros(len(tokens), np.int32),
        )

    def add_scores(self, window: Window, log_likelihood: np.ndarray, rank: np.ndarray) -> None:
        """Store the scores of the tokens that a window predicts."""
        first = window.first + 1 - self.n_prepended
        end = window.end + 1 - self.n_prepended
        first_visible = max(0, window.begin - self.n_prepended)
        self.scores.log_likelihood[first:end] = log_likelihood
        self.scores.rank[first:end] = rank
        self.scores.n_context[first:end] = np.arange(first, end) - first_visible
        self.n_unscored -= window.end - window.first


_BatchOfWindows = list[tuple[_ScoredDocument, Window]]


def score_documents(
    decoder: Decoder,
    documents: Iterable[Sequence[int]],
    length: int,
    stride: int,
    separator: Separator = Separator(),
    batch_size: int | None = None,
    is_one_document: bool = False,
) -> Iterator[Scores]:
    """Yield the scores of each document, in order.

    Args:
        decoder: The network, in eval mode.
        documents: Token ids, at least one per document.
        length: Tokens in a window.
        stride: Tokens by which windows advance.
        separator: Put in front of a document that does not begin with it.
        batch_size: Windows in a forward pass; None to choose it by size. It changes no score.
        is_one_document: Whether a separator inside a document is a token like any other, as in a
            conversation.

    Raises:
        UserError: A setting is out of range. A token is outside the vocabulary. Memory does not
            suffice.
    """
    if not 1 <= stride <= length:
        raise UserError(
            f"--stride {stride} must be between 1 and the window's {length} tokens: change it"
        )
    vocabulary = decoder.embedding.num_embeddings
    default_batch_size = max(1, min(MAX_TOKENS // length, MAX_LOGITS // (length * vocabulary)))
    width = length if positions_depend_on_length(decoder) else None
    unfinished: deque[_ScoredDocument] = deque()
    batch: _BatchOfWindows = []
    for tokens in documents:
        check_prompt(tokens, vocabulary)
        document = _ScoredDocument(tokens, separator, is_one_document)
        unfinished.append(document)
        for window in split_into_windows(document.n_inputs, length, stride):
            batch.append((document, window))
            if len(batch) == (batch_size or default_batch_size):
                _score_windows(decoder, batch, width)
                batch = []
        while unfinished and not unfinished[0].n_unscored:
            yield unfinished.popleft().scores
    if batch:
        _score_windows(decoder, batch, width)
    for document in unfinished:
        yield document.scores


@torch.inference_mode()
def _score_windows(decoder: Decoder, batch: _BatchOfWindows, width: int | None) -> None:
    """Score windows in one forward pass.

    They are padded on the right to a common length, or to `width`. No token sees the padding.
    """
    width = width or max(window.end - window.begin for _, window in batch)
    n_logits = width - min(window.first - window.begin for _, window in batch)
    n_skipped = width - n_logits  # inputs before the first logits
    rows = []
    row_ids = []
    targets = []
    for document, window in batch:
        rows.append(document.row[window.begin : window.end])
        row_ids.append(document.ids[window.begin : window.end])
        targets.append(document.row[window.begin + n_skipped + 1 : window.end + 1])
    device = decoder.embedding.weight.device
    tokens = _stack(rows, width).to(device)
    ids = _stack(row_ids, width)
    target_index = _stack(targets, n_logits).to(device)[..., None]
    with enough_memory(len(batch), width, device, "set a smaller --batch_size or --length"):
        ids_or_none = ids.to(device) if ids.any() else None
        logits = decoder(tokens, ids_or_none, n_logits=n_logits).float()
        target_logits = check_finite(logits.gather(-1, target_index))
        log_likelihood = (target_logits - logits.logsumexp(-1, keepdim=True))[..., 0].cpu().numpy()
        rank = ((logits > target_logits).sum(-1) + 1).cpu().numpy()
    for row, (document, window) in enumerate(batch):
        first = window.first - window.begin - n_skipped
        scored = slice(first, first + window.end - window.first)  # without the padding
        document.add_scores(window, log_likelihood[row, scored], rank[row, scored])


def _stack(rows: list[np.ndarray], width: int) -> Tensor:
    """Stack rows, (B, width) int64, padded with their last number: it begins no new document."""
    padded_rows = []
    for row in rows:
        n_missing = width - len(row)
        padded_rows.append(np.pad(row, (0, n_missing), mode="edge"))
    return torch.from_numpy(np.stack(padded_rows))
