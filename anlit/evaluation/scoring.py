"""Log-likelihoods of text, token by token, in windows if a document is longer than the context.

The first window of a document has its first `length` tokens. Each next window ends `stride` tokens later and begins
`length` tokens before its end. It scores only tokens that the window before has not scored. So the context of a token
is all of its document before it, or at least `length − stride` tokens. With stride = length every token is read once;
with stride = 1 every token has the full context of a window.

If the vocabulary has a separator of documents, the first token of a document is scored too, after the separator alone.
The rest of the text sees the separator only if training texts did: if documents begin with it, or are not masked. A
text for an imported model begins with the special token that its tokenizer puts in front of one, such as Llama's `<s>`.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.evaluation.generation import Ending, check_prompt, finite, stretches
from anlit.io.write import replacing
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.runtime import enough_memory

BATCH_TOKENS = 1 << 14
"""The most tokens in a forward pass, unless one window has more."""
LOGITS = 1 << 27
"""The most logits of a forward pass, 512 MiB in float32, unless one window has more."""
SCHEMA = pa.schema({
    "document": pa.int64(),  # from 0, in the order of the files
    "position": pa.int64(),  # of the token in its document, from 0
    "token": pa.int32(),
    "text": pa.string(),  # the characters that the token completes; joined, they are the document
    "byte_start": pa.int64(),  # range of the characters that the token is part of, in the document's UTF-8 bytes
    "byte_end": pa.int64(),
    "n_context": pa.int32(),  # tokens of the document that the model saw before it
    "log_likelihood": pa.float32(),  # nats; null if nothing was before the token
    "rank": pa.int32(),  # 1 if no token was more probable; null if nothing was before the token
    "source": pa.string(),  # the file and the record that the document comes from
})  # fmt: skip
"""The table of many documents' scores, a row for each token."""
ROW_GROUP = 1 << 17
"""Tokens in a row group, which is written at once."""


class Scores(NamedTuple):
    """The scores of the tokens of one document, in order; each array is (n,), and what they are says `SCHEMA`.

    A first token without context has a log-likelihood of NaN and a rank of 0.
    """

    tokens: np.ndarray
    log_likelihood: np.ndarray
    rank: np.ndarray
    n_context: np.ndarray


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

    def __init__(self, tokens: Sequence[int], ending: Ending, is_one_document: bool) -> None:
        begins_with_it = tokens[0] == ending.token
        before = [] if ending.token is None or begins_with_it else [ending.token]
        self.row = np.array([*before, *tokens])
        separator = -1 if ending.token is None else ending.token
        self.ids = document_ids(self.row[None], separator, ending.at)[0]
        self.offset, self.left = (
            len(before),
            len(self.row) - 1,
        )  # of the row against the tokens; inputs to score
        if is_one_document:
            self.ids = np.minimum(self.ids, self.ids[self.offset])
        rank, n_context = np.zeros((2, len(tokens)), np.int32)
        self.scores = Scores(
            self.row[self.offset :], np.full(len(tokens), np.nan, np.float32), rank, n_context
        )

    def note(self, window: Window, log_likelihood: np.ndarray, rank: np.ndarray) -> None:
        scored = slice(window.first + 1 - self.offset, window.end + 1 - self.offset)
        self.scores.log_likelihood[scored], self.scores.rank[scored] = log_likelihood, rank
        self.scores.n_context[scored] = np.arange(scored.start, scored.stop) - max(
            0, window.begin - self.offset
        )
        self.left -= window.end - window.first


def score(
    decoder: Decoder,
    documents: Iterable[Sequence[int]],
    length: int,
    stride: int,
    ending: Ending = Ending(),
    batch_size: int | None = None,
    is_one_document: bool = False,
) -> Iterator[Scores]:
    """The scores of each document, in order.

    Args:
        decoder: The network, in eval mode.
        documents: Their tokens, one or more. One that begins with the separator does not get a second one.
        length: Tokens in a window.
        stride: Tokens by which windows advance.
        batch_size: Windows in a forward pass; None to choose it by size. It does not change the scores.
        is_one_document: Whether a separator inside a document is a token as any other, such as in a conversation.

    Raises:
        UserError: A setting is out of range, a token is outside the vocabulary, or memory does not suffice.
    """
    if not 1 <= stride <= length:
        raise UserError(f"--stride {stride} must be between 1 and the window's {length} tokens")
    vocabulary = decoder.embedding.num_embeddings
    rows = batch_size or max(1, min(BATCH_TOKENS // length, LOGITS // (length * vocabulary)))
    width = length if stretches(decoder, length) else None
    sequences: deque[_Sequence] = deque()
    waiting: list[tuple[_Sequence, Window]] = []
    for tokens in documents:
        check_prompt(tokens, vocabulary)
        sequences.append(_Sequence(tokens, ending, is_one_document))
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
    tokens = _stack([sequence.row[window.begin : window.end] for sequence, window in batch], width)
    ids = _stack([sequence.ids[window.begin : window.end] for sequence, window in batch], width)
    n_logits = width - min(window.first - window.begin for _, window in batch)
    skipped, device = (
        width - n_logits,
        decoder.embedding.weight.device,
    )  # inputs before the first logits
    targets = [
        sequence.row[window.begin + skipped + 1 : window.end + 1] for sequence, window in batch
    ]
    index = _stack(targets, n_logits).to(device)[
        ..., None
    ]  # padding gives scores that are not read
    with enough_memory(len(batch), width, device, "set a smaller --batch_size or --length"):
        logits = decoder(
            tokens.to(device), ids.to(device) if ids.any() else None, n_logits=n_logits
        ).float()
        of_targets = finite(logits.gather(-1, index))
        log_likelihood = (of_targets - logits.logsumexp(-1, keepdim=True))[..., 0].cpu().numpy()
        rank = ((logits > of_targets).sum(-1) + 1).cpu().numpy()
    for number, (sequence, window) in enumerate(batch):
        begin = window.first - window.begin - skipped
        scored = slice(begin, begin + window.end - window.first)
        sequence.note(window, log_likelihood[number, scored], rank[number, scored])


def _stack(rows: list[np.ndarray], width: int) -> Tensor:
    """(B, width) int64. Rows are padded with their last number, so that padding is no other document."""
    return torch.from_numpy(
        np.stack([np.pad(row, (0, width - len(row)), mode="edge") for row in rows])
    )


def write_table(
    path: Path,
    record: Mapping[str, Any],
    documents: Iterable[tuple[Scores, str, np.ndarray, str]],
) -> None:
    """Write a parquet file that appears under its name when it is complete; an existing one is replaced.

    Args:
        record: Written as JSON into the file's metadata, under `anlit`.
        documents: The scores of n tokens, their text, the tokens' byte ranges in it, (n, 2) int64, and its origin: the
            file, and the record in it. UserError if the file cannot be written.
    """
    if path.is_dir():
        raise UserError(
            f"--output {path} is a folder: give the name of a file, such as {path}/scores.parquet"
        )
    if path.suffix != ".parquet":
        raise UserError(f"--output {path} would hold parquet: give a name that ends in .parquet")
    schema = SCHEMA.with_metadata({"anlit": json.dumps(record)})
    waiting: list[pa.Table] = []
    n_waiting = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(path) as partial,
            partial.open("wb") as file,  # pyarrow takes no name that is not UTF-8
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for number, (scores, text, ranges, source) in enumerate(documents):
                n = len(scores.tokens)
                columns = {
                    "document": np.full(n, number),
                    "position": np.arange(n),
                    "token": scores.tokens,
                    "text": _pieces(text, ranges),
                    "byte_start": ranges[:, 0],
                    "byte_end": ranges[:, 1],
                    "n_context": scores.n_context,
                    "log_likelihood": pa.array(scores.log_likelihood, mask=scores.rank == 0),
                    "rank": pa.array(scores.rank, mask=scores.rank == 0),
                    "source": [source] * n,
                }
                waiting.append(pa.Table.from_pydict(columns, schema=schema))
                n_waiting += n
                if n_waiting >= ROW_GROUP:
                    writer.write_table(pa.concat_tables(waiting))
                    waiting, n_waiting = [], 0
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
    except OSError as error:
        raise UserError(
            f"--output {path} cannot be written ({error.strerror or error}): name another"
        ) from error


def _pieces(text: str, ranges: np.ndarray) -> list[str]:
    """The text, cut after the last character that each token completes: the next token may begin within one."""
    content = text.encode()
    ends = np.maximum.accumulate(np.minimum(ranges[:-1, 1], ranges[1:, 0]))
    return [
        content[begin:end].decode() for begin, end in pairwise([0, *ends.tolist(), len(content)])
    ]


def byte_ranges(text: str, characters: Sequence[tuple[int, int]]) -> np.ndarray:
    """Ranges of UTF-8 bytes for ranges of characters, (n, 2) int64."""
    if text.isascii():
        return np.array(characters, np.int64).reshape(-1, 2)
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    return np.concatenate(([0], sizes.cumsum()))[np.array(characters, np.int64).reshape(-1, 2)]
