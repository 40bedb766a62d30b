"""Safe output of foreign text, such as names, settings and messages of other people's runs."""

import json
import logging
import os
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from anlit.io.write import jsonable

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Control, format (writing direction, invisible), surrogate and private characters, line and paragraph separators."""
KEPT = "\n\t\u200c\u200d"
"""What `echo` leaves as it is: line breaks, tabs, and the joiners that Persian, Hindi and emoji are written with."""
MARKUP = re.compile(r"[\\`*\[\]<>&]|(?<![^\W_])_|_(?![^\W_])")
"""What begins a link, a picture, HTML, code, emphasis or an entity; an underscore inside a word begins nothing."""


def without_control_codes(text: str, keep: str = "") -> str:
    r"""`text` with control characters but those to `keep` escaped, such as `\x1b`, so that a terminal obeys none."""
    hidden = {char for char in text if unicodedata.category(char) in HIDDEN} - {*keep}
    return text.translate({ord(char): char.encode("unicode_escape").decode() for char in hidden})


def echo(text: str = "", to: TextIO | None = None, end: str = "\n") -> None:
    """Print `text`, which may be foreign, to standard output or `to`; a terminal obeys no control character in it."""
    print(
        without_control_codes(text, KEPT) + end, end="", file=to, flush=True
    )  # one write: threads may print too


class LastingOutput:
    """A text stream that goes on where its reader is gone or its disk is full; lines are lost then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let standard output and error be `LastingOutput`: a run is worth more than its lines of progress."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, LastingOutput(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            discard_unwritable(stream)


def discard_unwritable(stream: TextIO) -> bool:
    """Flush a stream, and send it to nowhere if that fails: Python would complain at its end."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False


def json_line(value: Any) -> str:
    """`value` as one line of JSON, see `jsonable`, with control codes escaped as JSON does it, so that none is lost."""
    line = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False)
    hidden = {char for char in line if unicodedata.category(char) in HIDDEN}
    return line.translate({ord(char): json.dumps(char)[1:-1] for char in hidden})


class VisibleRecord(logging.LogRecord):
    """A log message in which control characters are escaped."""

    def getMessage(self) -> str:  # noqa: N802  logging's name
        return without_control_codes(super().getMessage(), KEPT)


def literal(text: str) -> str:
    """Markdown that shows `text` as it is: no link, picture, HTML or emphasis, all in one line."""
    return MARKUP.sub(
        lambda mark: "\\" + mark[0], without_control_codes(" ".join(text.splitlines()))
    )


def code(text: str) -> str:
    """Markdown that shows `text` as code, whatever backticks it has."""
    shown = without_control_codes(" ".join(text.splitlines()))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    padding = " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{padding}{shown}{padding}{fence}"


def say(text: str) -> None:
    """Print one line to standard error, with the time of day."""
    echo(f"{time.strftime('%H:%M:%S')}  {without_control_codes(text)}", sys.stderr)


def short_number(value: float) -> str:
    """`1.3M`, `820k`, `0.004`."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    size, letter = next((pair for pair in sizes if value >= pair[0]), (1.0, ""))
    return f"{value / size:.3g}{letter}"


def minus(number: str) -> str:
    """A number with the minus sign of figures, `−0.5`."""
    return number.replace("-", "−")
