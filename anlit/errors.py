"""Errors that a user can correct, and the record of one that nobody foresaw."""

import os
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

Cause = TypeVar("Cause", bound=BaseException)
RUN_FOLDER: ContextVar[str] = ContextVar("RUN_FOLDER", default="")
"""Where the traceback of an unforeseen error is kept; "" for the folder of temporary files."""
LONGEST_MESSAGE = 300
PANIC = "PanicException"
"""What the tokenizers library, in Rust, raises where it fails itself: no `Exception`, and importable from nowhere."""

PREEMPTED = 75
"""Exit code of a run that is to be started again, EX_TEMPFAIL of sysexits.h."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended before it could end in order."""


class Preempted(KeyboardInterrupt):
    """A run that was preempted, or out of `max_time`, and can be continued. Lightning treats it like Ctrl-C."""


class UserError(ValueError):
    """Something in the user's command, configuration or data is wrong. The message is one sentence that names the key,
    the value and the fix; the command line prints it without a traceback, and exits with `exit_code`."""

    exit_code = 2


class RunError(UserError):
    """A correctly configured run cannot continue, for example on a full disk. The message is as in `UserError`."""

    exit_code = 1


def install(extra: str, package: str) -> str:
    """What to do about an optional package that is missing: in the repository, or with an installed wheel."""
    return f"run `make extras EXTRAS={extra}`, or pip install {package}"


@contextmanager
def panics_told() -> Iterator[None]:
    """Raise UserError where the library fails in the middle of a text, for example in a pattern without end."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != PANIC:
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"the tokenizer fails on a text ({reason}): give another tokenizer.json, with simpler "
            "expressions in its pre_tokenizer and normalizer"
        ) from error


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def cause_of(error: BaseException, kind: type[Cause]) -> Cause | None:
    """Return the first error of a kind in the chain of errors, None if there is none."""
    return next((link for link in chain_of(error) if isinstance(link, kind)), None)


def unforeseen(error: BaseException) -> str:
    """Write the traceback of an error that is no `UserError` to a file, and return one sentence that names the file."""
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = f"anlit {' '.join(sys.argv[1:])}\n\n{''.join(traceback.format_exception(error))}"
    for folder in (RUN_FOLDER.get() or tempfile.gettempdir(), tempfile.gettempdir()):
        try:
            (file := Path(folder) / name).write_text(
                text, encoding="utf-8", errors="backslashreplace"
            )
            break
        except OSError:  # a full disk, for example
            file = Path()
    message = textwrap.shorten(str(error), LONGEST_MESSAGE, placeholder=" …")
    place = traceback.extract_tb(error.__traceback__)[-1]
    kept = (
        f"please report it with {file}, which has the traceback"
        if file.name
        else "its traceback could not be kept"
    )
    return (
        f"unforeseen {type(error).__name__} ({message}) at {place.filename}:{place.lineno}: {kept}"
    )
