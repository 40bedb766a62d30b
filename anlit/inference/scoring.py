"""Log-likelihoods of text, token by token, in windows if a document is longer than the context.

The first window of a document has its first `length` tokens. Each next window ends `stride` tokens later and begins
`length` tokens before its end. It scores only tokens that the window before has not scored. So the context of a token
is all of its document before it, or at least `length − stride` tokens. With stride = length every token is read once;
with stride = 1 every token has the full context of a window.

If the vocabulary has a separator of documents, the first token of a document is scored too, after the separator alone.
The rest of the text sees the separator only if training texts did: if documents begin with it, or are not masked.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.inference.generation import Ending, check_prompt, finite, stretches
from anlit.inference.token_table import Scores
from anlit.models.decoder import Decoder

BATCH_TOKENS = 1 << 14
"""The most tokens in a forward pass, unless one window has more."""
LOGITS = 1 << 27
"""The most logits of a forward pass, 512 MiB in float32, unless one window has more."""


class Window(NamedTuple):
    """Inputs [begin, end) of a sequence. Inputs from `first` on predict the tokens that are scored."""

    begin: int
    first: int
    end: int


def windows(n_inputs: int, length: int, stride: int) -> Iterator[Window]:
    """The windows of a sequence. Together they score the token after every input once."""
    first = 0
    while first < n_inputs:
        end = min(n_inputs, length if first == 0 else first + stride)
        yield Window(max(0, end - length), first, end)
        first = end


class _Sequence:
    """A document that is being scored: its tokens with the separator, and the scores so far."""

    def __init__(self, tokens: np.ndarray, ending: Ending) -> None:
        self.has_separator = ending.token is not None
        row = np.concatenate(([ending.token], tokens)) if ending.token is not None else tokens
        self.tokens, self.row = tokens, row
        ids = document_ids(row[None], ending.token, ending.at)[0] if ending.token is not None else np.zeros(len(row))
        self.ids = ids.astype(np.int64)
        self.left = len(row) - 1
        shape = len(tokens)
        self.scores = Scores(
            tokens, np.full(shape, np.nan, np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        )

    def note(self, window: Window, log_likelihood: np.ndarray, rank: np.ndarray) -> None:
        offset = int(self.has_separator)  # of the row against the tokens
        scored = slice(window.first + 1 - offset, window.end + 1 - offset)
        self.scores.log_likelihood[scored], self.scores.rank[scored] = log_likelihood, rank
        self.scores.n_context[scored] = np.arange(scored.start, scored.stop) - max(0, window.begin - offset)
        self.left -= window.end - window.first


def score(
    decoder: Decoder,
    documents: Iterable[np.ndarray],
    length: int,
    stride: int | None = None,
    ending: Ending = Ending(),
    batch_size: int | None = None,
) -> Iterator[Scores]:
    """The scores of each document, in order.

    Args:
        decoder: The network, in eval mode.
        documents: Their tokens, (n,) integers with n ≥ 1, without separators.
        length: Tokens in a window.
        stride: Tokens by which windows advance; None for half of `length`.
        batch_size: Windows in a forward pass; None to choose it by size. It does not change the scores.

    Raises:
        UserError: A setting is out of range, a token is outside the vocabulary, or memory does not suffice.
    """
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise UserError(f"--stride {stride} must be between 1 and the window's {length} tokens")
    vocabulary = decoder.embedding.num_embeddings
    rows = batch_size or max(1, min(BATCH_TOKENS // length, LOGITS // (length * vocabulary)))
    width = length if stretches(decoder, length) else None
    sequences: deque[_Sequence] = deque()
    waiting: list[tuple[_Sequence, Window]] = []
    for tokens in documents:
        check_prompt(tokens.tolist(), vocabulary)
        sequences.append(_Sequence(np.asarray(tokens, np.int64), ending))
        for window in windows(len(sequences[-1].row) - 1, length, stride):
            waiting.append((sequences[-1], window))
            if len(waiting) == rows:
                _read(decoder, waiting, width)
                waiting = []
        while sequences and not sequences[0].left:
            yield sequences.popleft().scores
    if waiting:
        _read(decoder, waiting, width)
    yield from (sequence.scores for sequence in sequences)


@torch.inference_mode()
def _read(decoder: Decoder, batch: list[tuple[_Sequence, Window]], width: int | None) -> None:
    """One forward pass over windows, padded on the right to one length, or to `width`; no token sees the padding."""
    width = width or max(window.end - window.begin for _, window in batch)
    parts = [slice(window.begin, window.end) for _, window in batch]
    tokens = _stack([sequence.row[part] for (sequence, _), part in zip(batch, parts, strict=True)], width)
    ids = _stack([sequence.ids[part] for (sequence, _), part in zip(batch, parts, strict=True)], width)
    n_logits = width - min(window.first - window.begin for _, window in batch)
    device = decoder.embedding.weight.device
    try:
        logits = decoder(tokens.to(device), ids.to(device) if ids.any() else None, n_logits=n_logits).float()
        log_likelihood, rank = _scores_of(logits, batch, width - n_logits)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"A forward pass over {len(batch)} × {width:,} tokens does not fit the memory of {device}: "
            "set a smaller --batch_size or --length"
        ) from error
    for number, (sequence, window) in enumerate(batch):
        begin = window.first - window.begin - (width - n_logits)
        scored = slice(begin, begin + window.end - window.first)
        sequence.note(window, log_likelihood[number, scored], rank[number, scored])


def _scores_of(logits: Tensor, batch: list[tuple[_Sequence, Window]], skipped: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihood and rank of each next token, (B, n), with meaningless values for padding.

    Args:
        logits: (B, n, V).
        batch: The sequences and their windows.
        skipped: Number of inputs before the first logits.
    """
    targets = [sequence.row[window.begin + skipped + 1 : window.end + 1] for sequence, window in batch]
    index = _stack(targets, logits.shape[1]).to(logits.device)[..., None]
    of_targets = finite(logits.gather(-1, index))
    log_likelihood = (of_targets - logits.logsumexp(-1, keepdim=True))[..., 0]
    rank = (logits > of_targets).sum(-1) + 1
    return log_likelihood.cpu().numpy(), rank.cpu().numpy()


def _stack(rows: list[np.ndarray], width: int) -> Tensor:
    """(B, width) int64. Rows are padded with their last number, so that padding is no other document."""
    return torch.from_numpy(np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows]))
