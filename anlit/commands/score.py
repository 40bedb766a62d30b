"""`anlit score`: writes the log-likelihood of every token of texts, as parquet."""

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

from anlit.checkpoints.location import find_checkpoint
from anlit.commands.garbage_collection import collector_paused
from anlit.config.options import ToolParser, at_least, whole_number
from anlit.errors import UserError
from anlit.evaluation.documents import read_documents
from anlit.reporting.text import echo, json_line, say

SUMMARY = """\
{output}: {tokens:,} tokens, {bytes:,} bytes (documents: {documents:,})
{nats:,.4f} nats, {nats_per_token:.4f} per token, {bits_per_byte:.4f} bits per byte"""

BYTES_PER_TOKEN = 4
"""Bytes of a token in usual text, to estimate the number of tokens."""


class EncodedDocument(NamedTuple):
    """A document before it is scored."""

    tokens: list[int]
    text: str
    byte_ranges: Any
    """(n, 2) int64: the bytes of each of the n tokens in the text."""
    origin: str
    """The file, and the record in it."""


@dataclass
class Totals:
    """Sums over all documents."""

    documents: int = 0
    changed: int = 0
    """Documents that the tokenizer gives back as another text."""
    tokens: int = 0
    scored: int = 0
    """Tokens with a log-likelihood: the first of a text may have none."""
    bytes: int = 0
    """Bytes of the scored tokens."""
    nats: float = 0

    def add(self, document: EncodedDocument, scores: Any) -> None:
        is_scored = scores.rank > 0
        self.documents += 1
        self.tokens += len(is_scored)
        self.scored += int(is_scored.sum())
        unscored_bytes = 0 if is_scored[0] else int(document.byte_ranges[0, 1])
        self.bytes += int(document.byte_ranges[-1, 1]) - unscored_bytes
        self.nats -= float(scores.log_likelihood[is_scored].sum(dtype=float))

    def with_ratios(self) -> dict[str, float]:
        """Return the sums, nats per token and bits per byte; NaN where a ratio is undefined."""
        nats_per_token = self.nats / self.scored if self.scored else math.nan
        bits_per_byte = math.nan
        if self.bytes and not self.changed:
            bits_per_byte = self.nats / math.log(2) / self.bytes
        ratios = {"nats_per_token": nats_per_token, "bits_per_byte": bits_per_byte}
        return asdict(self) | ratios


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit score",
        description="Writes the log-likelihood of every token of texts as parquet: document, "
        "position, token, its text and bytes, tokens of context, log-likelihood, rank, source. A "
        "text longer than a window is read in windows that advance by the stride; every token is "
        "scored once, with at least length − stride tokens of context, or all that the document "
        "has before it.",
        epilog="Example: "
        "anlit score runs/angpt-seed1 book.txt reviews.jsonl --output scores.parquet",
    )
    add_model_options(parser)
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="text (one document), .json or .jsonl of lines, .parquet, or - for stdin",
    )
    add(
        "--output", required=True, metavar="FILE", help="the table to write, such as scores.parquet"
    )
    add(
        "--length",
        type=at_least(1),
        metavar="N",
        help="tokens in a window (default: the training length)",
    )
    add(
        "--stride",
        type=whole_number,
        metavar="N",
        help="tokens by which windows advance (default: half of a window)",
    )
    add(
        "--batch_size",
        type=at_least(1),
        metavar="N",
        help="windows in a batch (default: about 16,000 tokens)",
    )
    add("--field", default="text", help="field of a record that has its text (default: text)")
    add("--json", action="store_true", help="print the totals as JSON")
    return parser


def add_model_options(parser: ToolParser) -> None:
    """Add the options of `generate` and `score` that load a model with its tokenizer."""
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder (its best checkpoint), .ckpt file or exported folder",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json (default: from the checkpoint's data)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add(
        "--chat",
        action="store_true",
        help="a text is a user's message, or a JSON list of messages "
        '[{"role": …, "content": …}]: the model\'s chat template makes its prompt',
    )
    add(
        "--special_tokens",
        action="store_true",
        help="the name of a special token in a text, such as <|im_end|>, is that token "
        "(default: letters)",
    )


def main(argv: list[str]) -> None:
    options = parser().parse_args(argv)
    find_checkpoint(options.checkpoint)

    with collector_paused():  # torch takes seconds
        from anlit.evaluation.scores_table import ScoredText, write_table
        from anlit.evaluation.scoring import score_documents
        from anlit.evaluation.tokenizer import load_checkpoint_tokenizer
        from anlit.nn.models.runtime import allow_compiled_kernels
        from anlit.training.load_model import describe, load_checkpoint

    checkpoint = load_checkpoint(options.checkpoint, options.device)
    decoder = checkpoint.model.model
    tokenizer = load_checkpoint_tokenizer(
        checkpoint, options.tokenizer, options.special_tokens or options.chat
    )
    length = options.length or checkpoint.training_length
    stride = max(1, length // 2) if options.stride is None else options.stride
    allow_compiled_kernels(decoder, _estimated_inputs(options.files, length, stride), length)

    totals = Totals()
    documents, documents_to_score = tee(_encode_documents(options, tokenizer, totals))
    document_scores = score_documents(
        decoder,
        (document.tokens for document in documents_to_score),
        length,
        stride,
        tokenizer.scoring_separator(),
        options.batch_size,
        is_one_document=tokenizer.inner_separator(options.chat).token is None,
    )

    def scored_documents() -> Iterator[ScoredText]:
        for scores, document in zip(document_scores, documents, strict=True):
            totals.add(document, scores)
            yield ScoredText(scores, document.text, document.byte_ranges, document.origin)

    record = {"command": shlex.join(["anlit", "score", *argv]), "length": length, "stride": stride}
    write_table(Path(options.output), record | describe(checkpoint), scored_documents())
    if totals.changed:
        say(
            f"The tokenizer gives back {totals.changed:,} of {totals.documents:,} documents as "
            "another text, so bits per byte are not known."
        )
    results = totals.with_ratios()
    if options.json:
        echo(json_line(results))
    else:
        echo(SUMMARY.format(output=options.output, **results))


def _estimated_inputs(files: Sequence[str], length: int, stride: int) -> int:
    """Return about how many tokens the model reads. Windows overlap, so it reads some twice."""
    paths = [Path(name) for name in files]
    n_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    return n_bytes // BYTES_PER_TOKEN * length // max(1, stride)


def _encode_documents(
    options: argparse.Namespace, tokenizer: Any, totals: Totals
) -> Iterator[EncodedDocument]:
    """Encode the texts of the files, and count the texts that their tokens do not give back.

    Raises UserError if a text has no tokens.
    """
    import numpy as np

    from anlit.data.round_trip import ChangeKind, RoundTrip
    from anlit.evaluation.chat import read_messages
    from anlit.evaluation.scores_table import to_byte_ranges

    round_trip = RoundTrip(tokenizer.tokenizer)
    for document, origin in read_documents(options.files, options.field, options.chat):
        if options.chat:
            document = tokenizer.render_chat(read_messages(document), is_answered=True)
        encoding = tokenizer.tokenizer.encode(document, add_special_tokens=False)
        if not encoding.ids:
            raise UserError(f"{origin}: the tokenizer makes no tokens of its text: leave it out")
        (change,) = round_trip.find_changes([document], [np.array(encoding.ids)])
        if change not in (None, ChangeKind.NORMALISED):
            totals.changed += 1
        ranges = to_byte_ranges(document, encoding.offsets)
        yield EncodedDocument(encoding.ids, document, ranges, origin)
