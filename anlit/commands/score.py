"""`anlit score`: writes the log-likelihood of every token of texts, as parquet."""

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import tee
from pathlib import Path
from typing import Any

from anlit.checkpoints.location import find_checkpoint
from anlit.config.options import ToolParser, at_least, whole_number
from anlit.errors import UserError
from anlit.reporting.text import echo, json_line, say

WORDS = """\
{output}: {tokens:,} tokens, {bytes:,} bytes (documents: {documents:,})
{nats:,.4f} nats, {nats_per_token:.4f} per token, {bits_per_byte:.4f} bits per byte"""

BYTES_PER_TOKEN = 4
"""Of usual text, to estimate how much there is to score."""


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit score",
        description="Writes the log-likelihood of every token of texts as parquet: document, position, token, its text "
        "and bytes, tokens of context, log-likelihood, rank, source. A text longer than a window is read in windows "
        "that advance by the stride; every token is scored once, with at least length − stride tokens of context, or "
        "all that the document has before it.",
        epilog="Example: anlit score runs/angpt-seed1 book.txt reviews.jsonl --output scores.parquet",
    )
    model_options(parser)
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="text (one document), .json or .jsonl of lines, .parquet",
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


def model_options(parser: ToolParser) -> None:
    """What `generate` and `score` need to load a model with its tokenizer."""
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder (its best checkpoint), .ckpt file or exported folder",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json (default: that of the checkpoint's data)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add(
        "--chat",
        action="store_true",
        help='a text is a user\'s message, or a JSON list of messages [{"role": …, "content": …}]: the model\'s chat '
        "template makes its prompt",
    )
    add(
        "--special_tokens",
        action="store_true",
        help="the name of a special token in a text, such as <|im_end|>, is that token (default: letters)",
    )


def main(argv: list[str]) -> None:
    given = parser().parse_args(argv)
    find_checkpoint(given.checkpoint)

    import numpy as np

    from anlit.data.round_trip import Kind, RoundTrip
    from anlit.evaluation.chat import read_messages
    from anlit.evaluation.scores_table import ScoredText, to_byte_ranges, write_table
    from anlit.evaluation.scoring import score_documents
    from anlit.evaluation.tokenizer import load_tokenizer
    from anlit.nn.models.runtime import allow_compiled_kernels
    from anlit.training.load_model import (  # after the check: torch takes seconds
        describe,
        load_checkpoint,
    )

    checkpoint = load_checkpoint(given.checkpoint, given.device)
    text = load_tokenizer(checkpoint, given.tokenizer, given.special_tokens or given.chat)
    length = given.length or checkpoint.training_length
    is_one_document = text.inner_separator(checkpoint, given.chat).token is None
    before = text.scoring_separator(checkpoint)
    round_trip = RoundTrip(text.tokenizer)
    stride = given.stride if given.stride is not None else max(1, length // 2)
    n_bytes = sum(Path(name).stat().st_size for name in given.files if Path(name).is_file())
    n_read = n_bytes // BYTES_PER_TOKEN * length // max(1, stride)
    allow_compiled_kernels(checkpoint.model.model, n_read, length)
    counts = ("documents", "changed", "tokens", "scored", "bytes", "nats")
    totals: dict[str, float] = dict.fromkeys(counts, 0)

    def encoded() -> Iterator[tuple[list[int], str, Any, str]]:
        for document, where in read_documents(given.files, given.field, given.chat):
            if given.chat:
                document = text.render_chat(read_messages(document), is_answered=True)
            encoding = text.tokenizer.encode(document, add_special_tokens=False)
            if not encoding.ids:
                raise UserError(f"{where}: the tokenizer makes no tokens of its text: leave it out")
            (change,) = round_trip.changes([document], [np.array(encoding.ids)])
            totals["changed"] += change is not None and change.kind != Kind.NORMALISED
            yield encoding.ids, document, to_byte_ranges(document, encoding.offsets), where

    def scored() -> Iterator[ScoredText]:
        read, kept = tee(encoded())
        documents = (tokens for tokens, *_ in read)
        scores = score_documents(
            checkpoint.model.model,
            documents,
            length,
            stride,
            before,
            given.batch_size,
            is_one_document,
        )
        for own, (_, document, ranges, where) in zip(scores, kept, strict=True):
            known = own.rank > 0
            totals["documents"] += 1
            totals["tokens"] += len(known)
            totals["scored"] += int(known.sum())
            totals["bytes"] += int(ranges[-1, 1]) - (
                0 if known[0] else int(ranges[0, 1])
            )  # of the scored tokens
            totals["nats"] -= float(own.log_likelihood[known].sum(dtype=float))
            yield ScoredText(own, document, ranges, where)

    record = {"command": shlex.join(["anlit", "score", *argv]), "length": length, "stride": stride}
    write_table(Path(given.output), record | describe(checkpoint), scored())
    totals["nats_per_token"] = totals["nats"] / totals["scored"] if totals["scored"] else math.nan
    totals["bits_per_byte"] = math.nan
    if totals["changed"]:
        say(
            f"The tokenizer gives back {totals['changed']:,} of {totals['documents']:,} documents as "
            "another text, so bits per byte are not known."
        )
    elif totals["bytes"]:
        totals["bits_per_byte"] = totals["nats"] / math.log(2) / totals["bytes"]
    echo(json_line(totals) if given.json else WORDS.format(output=given.output, **totals))


def read_documents(
    files: Sequence[str], field: str, are_chats: bool = False
) -> Iterator[tuple[str, str]]:
    """The texts of files, each with its file and record: plain text is one document, other files hold many, with the
    text in `field` of each record, where a conversation may be a list. UserError if one cannot be read.
    """
    from anlit.data.preparation.formats import Columns, read_file

    for name in files:
        if not Path(name).is_file():  # a pipe may never end
            raise UserError(
                f"{name} {'is a folder' if Path(name).is_dir() else 'is no file'}: give a file of text"
            )
    for name in files:
        shown_name = os.fsencode(name).decode(errors="backslashreplace")
        columns = Columns(field, max_document_bytes=1 << 40, lists=are_chats)
        try:
            for record in read_file(name, Path(name), columns):
                if record.text is None:
                    raise UserError(
                        f"{shown_name}, {record.location}: {record.detail}: correct it, or leave it out"
                    )
                yield record.text, f"{shown_name}, {record.location}"
        except OSError as error:
            raise UserError(
                f"{name} cannot be read ({error.strerror or error}): give a file of text"
            ) from error
