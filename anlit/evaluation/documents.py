"""Documents and prompts in files: plain text, JSON lines, parquet. This file imports no torch."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from anlit.errors import UserError

SURROGATE = re.compile("[\ud800-\udfff]")
"""Python's characters for the bytes of an argument that are not UTF-8."""
AS_UTF8 = "convert it, such as with iconv -f latin1 -t utf-8"
"""The fix for a text that is not UTF-8."""
STANDARD_INPUT = "-"
"""The name of standard input among files."""
LARGEST_DOCUMENT_BYTES = 1 << 40
"""No document is too long to be scored."""


def read_documents(
    files: Sequence[str], field: str, are_chats: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield each text of the files, with its file and record.

    A file of plain text is a document, and so is standard input, "-". Other files have a text in
    `field` of each record. With `are_chats` it may be a list of messages. Raises UserError if a
    file cannot be read.
    """
    from anlit.data.preparation.formats import read_file
    from anlit.data.preparation.formats.text import Columns

    fix = "give a file of text"
    for name in files:
        if name != STANDARD_INPUT and not Path(name).is_file():  # a pipe may never end
            kind = "a folder" if Path(name).is_dir() else "not a file"
            raise UserError(f"{name} is {kind}: {fix}")
    columns = Columns(field, max_document_bytes=LARGEST_DOCUMENT_BYTES, lists=are_chats)
    for name in files:
        if name == STANDARD_INPUT:
            yield read_standard_input(), "standard input"
            continue
        printable_name = os.fsencode(name).decode(errors="backslashreplace")
        try:
            for record in read_file(name, Path(name), columns):
                origin = f"{printable_name}, {record.location}"
                if record.text is None:
                    raise UserError(f"{origin}: {record.detail}: correct it, or leave it out")
                yield record.text, origin
        except OSError as error:
            cause = f"{name} cannot be read ({error.strerror or error})"
            raise UserError(f"{cause}: {fix}") from error


def read_standard_input() -> str:
    """Return all of it. Raises UserError if it is not UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 ({error}): {AS_UTF8}") from error
