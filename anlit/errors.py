"""Errors that a user can correct, and reports of unforeseen errors."""

import codecs
import errno
import locale
import os
import re
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

from anlit.error_origins import message_of, origin_of

Cause = TypeVar("Cause", bound=BaseException)
RUN_FOLDER: ContextVar[str] = ContextVar("RUN_FOLDER", default="")
"""The folder for the traceback of an unforeseen error; "" for the folder of temporary files."""
LONGEST_MESSAGE = 300
PANIC = "PanicException"
"""Name of the error that the Rust code of the tokenizers library raises when it fails.

It is not an `Exception`, and no module exports it.
"""

OUT_OF_MEMORY_MARKS = ("out of memory", "can't allocate memory", "_status_alloc_failed")
"""In small letters, what the messages of RuntimeErrors have where memory does not suffice."""
FULL_DISK_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Codes of the operating system for a full disk, a full quota and a file at its size limit."""
REFUSED_CODES = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Codes of the operating system for a read-only disk and for missing rights."""
CODE_IN_TEXT = re.compile(r"\(os error (\d+)\)")
"""The code in the message of a library in Rust, such as safetensors."""
WORKER_FIX = (
    "free memory, enlarge /dev/shm (a container's --shm-size), raise the limits of processes and "
    "open files (ulimit -u, -n)"
)
"""What helps if worker processes cannot be started, or cannot share their results."""
PREEMPTED = 75
"""Exit code of a run that has to be started again, EX_TEMPFAIL of sysexits.h."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended before it could end in order."""


class Preempted(KeyboardInterrupt):
    """A run was preempted, or reached `max_time`, and can be continued.

    Lightning treats it like Ctrl-C.
    """


class UserError(ValueError):
    """A mistake in the user's command, configuration or data.

    The message is one sentence that names the key, the value and the fix. The command line prints
    it without a traceback, and exits with `exit_code`.
    """

    exit_code = 2


class RunError(UserError):
    """A correctly configured run cannot continue, for example on a full disk.

    The message has the form of a `UserError`.
    """

    exit_code = 1


class DivergenceError(UserError):
    """A run's numbers became NaN or infinite. Its folder stays, even without a step."""


@contextmanager
def tokenizer_panics_as_errors() -> Iterator[None]:
    """Raise UserError if the tokenizers library fails in a text, for example on an endless pattern.

    Other errors pass.
    """
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


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the error that caused it, and so on."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of the host or of a GPU does not suffice.

    torch has a class for its own allocations alone. For those of the driver, NCCL and cuBLAS it
    raises a RuntimeError.
    """
    text = str(error).lower()
    has_mark = any(mark in text for mark in OUT_OF_MEMORY_MARKS)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and has_mark)


def disk_error(error: BaseException) -> RunError | None:
    """Return the sentence for a disk that is full or refuses a file; None for another error."""
    for link in error_chain(error):
        code = getattr(link, "errno", None)
        code_in_text = CODE_IN_TEXT.search(str(link))
        if code is None and code_in_text:
            code = int(code_in_text[1])
        path = getattr(link, "filename", None)
        if code in FULL_DISK_CODES:
            cause = f"{path or 'a file'} cannot be written ({os.strerror(code)})"
            return RunError(f"{cause}: make room, then repeat the command")
        if code in REFUSED_CODES and path:
            fix = "give a path that you may read and write"
            return RunError(f"{path} cannot be opened ({os.strerror(code)}): {fix}")
    return None


def encoding_error(error: BaseException) -> UserError | None:
    """Return the sentence for a text that the system's encoding lacks; None for another error.

    Libraries open files in that encoding, and anlit's files are in UTF-8.
    """
    encoding = locale.getencoding()
    is_utf_8 = sys.flags.utf8_mode or codecs.lookup(encoding).name == "utf-8"
    cause = find_cause(error, UnicodeError)
    if cause is None or is_utf_8:
        return None
    return UserError(
        f"a text is not in this system's encoding, {encoding} ({cause}): set PYTHONUTF8=1"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    lines = message_of(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def find_cause(error: BaseException, kind: type[Cause]) -> Cause | None:
    """Return the first error of a kind in the chain of errors, or None."""
    return next((link for link in error_chain(error) if isinstance(link, kind)), None)


def report_unforeseen(error: BaseException) -> str:
    """Write the traceback of an unforeseen error to a file; return a sentence that names the file.

    An error is unforeseen if it is not a `UserError`. The sentence names the line of the user's
    class that failed, if there is one.
    """
    path = _write_traceback(error)
    origin = origin_of(error)
    message = textwrap.shorten(message_of(error), LONGEST_MESSAGE, placeholder=" …")
    place = f"{origin.file}:{origin.line}"
    if origin.process is not None:
        place = f"{place} in {origin.process}"
    if path is None:
        advice = "its traceback could not be written"
    elif origin.is_users:
        advice = f"correct this line, or report it with {path}, which has the traceback"
    else:
        advice = f"please report it with {path}, which has the traceback"
    return f"unforeseen {origin.kind} ({message}) at {place}: {advice}"


def _write_traceback(error: BaseException) -> Path | None:
    """Write command and traceback to a new file; return its path, None if no folder accepts it."""
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = f"anlit {' '.join(sys.argv[1:])}\n\n{''.join(traceback.format_exception(error))}"
    for folder_of in (RUN_FOLDER.get, tempfile.gettempdir):
        try:
            path = Path(folder_of() or tempfile.gettempdir()) / name
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:  # a full disk, for example, or no folder of temporary files
            continue
        return path
    return None
