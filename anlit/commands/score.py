"""`anlit score`: writes the log-likelihood of every token of texts, as parquet."""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anlit.checkpoints.location import require_path
from anlit.errors import UserError
from anlit.options import CommandParser
from anlit.reporting.text import echo


class Document(NamedTuple):
    """A text, and the file and record that it comes from."""

    text: str
    where: str


@dataclass
class Totals:
    """Totals over all texts. `bytes` are those of the scored tokens."""

    documents: int = 0
    tokens: int = 0
    scored: int = 0
    bytes: int = 0
    nats: float = 0.0
    """Minus the sum of the log-likelihoods."""

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.scored if self.scored else math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def read_documents(files: Sequence[str], field: str) -> Iterator[Document]:
    """The texts of files: plain text is one document, JSON lines and parquet hold one per record.

    Args:
        field: The field of a record that has its text.

    Raises:
        UserError: A file or a record cannot be read.
    """
    from anlit.data.preparation.formats import Columns, read_file

    for name in files:
        try:
            for record in read_file(name, Path(name), Columns(field, max_document_bytes=1 << 40)):
                if record.text is None:
                    raise UserError(f"{name}, {record.where}: {record.detail}: correct it, or leave it out")
                yield Document(record.text, f"{name}, {record.where}")
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror or error}): give a file of text") from error


def score_files(arguments: argparse.Namespace, command: str = "") -> Totals:
    """Score the files and write the table.

    Raises:
        UserError: A file, the checkpoint, its tokenizer or a setting is wrong.
    """
    require_path(arguments.checkpoint)
    import numpy as np  # torch is imported after this check, because that takes seconds

    for name in arguments.files:
        if not Path(name).is_file():
            what = "is a folder" if Path(name).is_dir() else "does not exist"
            raise UserError(f"{name} {what}: give a file of text")

    from anlit.checkpoints.loading import describe, load_checkpoint
    from anlit.inference.scoring import score
    from anlit.inference.text import text_of
    from anlit.inference.token_table import byte_offsets, token_table

    checkpoint = load_checkpoint(arguments.checkpoint, arguments.device)
    text, length = text_of(checkpoint, arguments.tokenizer), arguments.length or checkpoint.training_length
    stride = arguments.stride if arguments.stride is not None else max(1, length // 2)
    offsets: list[tuple[np.ndarray, str]] = []
    totals = Totals()

    def tokens() -> Iterator[np.ndarray]:
        for document in read_documents(arguments.files, arguments.field):
            encoding = text.tokenizer.encode(document.text, add_special_tokens=False)
            if not encoding.ids:
                raise UserError(f"{document.where}: the tokenizer makes no tokens of its text: leave it out")
            offsets.append((byte_offsets(document.text, encoding.offsets), document.where))
            yield np.array(encoding.ids)

    record: dict[str, Any] = {"command": command, "length": length, "stride": stride, **describe(checkpoint)}
    found = score(checkpoint.model.model, tokens(), length, stride, text.ending, arguments.batch_size)
    with token_table(Path(arguments.output), text.tokenizer, record) as table:
        for number, scores in enumerate(found):
            byte_ranges, source = offsets.pop(0)
            table.add(number, scores, byte_ranges, source)
            known = ~np.isnan(scores.log_likelihood)
            totals.documents += 1
            totals.tokens += len(byte_ranges)
            totals.scored += int(known.sum())
            totals.bytes += int(byte_ranges[-1, 1]) - (0 if known[0] else int(byte_ranges[0, 1]))
            totals.nats -= float(scores.log_likelihood[known].sum(dtype=np.float64))
    return totals


def main(argv: list[str]) -> int:
    """`anlit score`; returns the exit status and raises UserError for the user's mistakes."""
    import json
    import shlex

    parser = CommandParser(
        prog="anlit score",
        description="Writes the log-likelihood of every token of texts as parquet: document, position, token, its text "
        "and bytes, tokens of context, nats, rank, source. A text longer than a window is read in windows that advance "
        "by the stride; every token is scored once, with at least length − stride tokens of context, or all that the "
        "document has before it.",
        epilog="Example: anlit score runs/angpt-seed1 book.txt reviews.jsonl --output scores.parquet",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="run folder (its best checkpoint), .ckpt file or exported folder")
    add("files", nargs="+", metavar="FILE", help="text (one document), .jsonl, .jsonl.zst or .parquet")
    add("--output", required=True, metavar="FILE", help="the table to write, such as scores.parquet")
    add("--length", type=int, metavar="N", help="tokens in a window (default: the training length)")
    add("--stride", type=int, metavar="N", help="tokens by which windows advance (default: half of a window)")
    add("--batch_size", type=int, metavar="N", help="windows in a batch (default: about 16,000 tokens)")
    add("--field", default="text", help="field of a record that has its text (default: text)")
    add("--tokenizer", metavar="FILE", help="tokenizer.json (default: that of the checkpoint's data)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add("--json", action="store_true", help="print the totals as JSON")
    arguments = parser.parse_args(argv)
    if any(number is not None and number < 1 for number in (arguments.length, arguments.batch_size)):
        raise UserError("--length and --batch_size must be at least 1")
    totals = score_files(arguments, shlex.join(["anlit", "score", *argv]))
    figures = asdict(totals) | {"nats_per_token": totals.nats_per_token, "bits_per_byte": totals.bits_per_byte}
    if arguments.json:
        echo(json.dumps(figures))
    else:
        echo(
            f"{arguments.output}: {totals.documents:,} documents, {totals.tokens:,} tokens, {totals.bytes:,} bytes\n"
            f"{totals.nats:,.4f} nats, {totals.nats_per_token:.4f} per token, {totals.bits_per_byte:.4f} bits per byte"
        )
    return 0
