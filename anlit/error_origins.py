"""Finds where an error was raised and what it said, also in a worker process.

DataLoader and process pools raise a worker's error again in the run. The error's own traceback then
ends in the library, and the worker's traceback is a text.
"""

import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, whose lines a user does not correct."""
COMPILED = "torchinductor"
"""In the name of the folder of code that torch.compile has written."""
DATA_WORKER = re.compile(
    r"Caught (?P<kind>\S+) in (?P<process>.+)\.\nOriginal Traceback \(most recent call last\):\n"
)
"""The beginning of the message of a DataLoader's error, before the worker's traceback."""
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+).*\n(?:    .*\n)*', re.MULTILINE)
"""A frame of a traceback: its file, its code and the marks under the code."""


@dataclass(frozen=True)
class ErrorOrigin:
    """Where an error was raised."""

    kind: str
    """The class of the error."""
    file: str
    """The file of the last line that is the user's, else of the last line."""
    line: int
    is_users: bool
    """Whether the line is of neither anlit nor an installed package."""
    process: str | None
    """The worker process, None for this process."""


def origin_of(error: BaseException) -> ErrorOrigin:
    """Return where an error was raised, if need be from the text of a worker's traceback."""
    kind = type(error).__name__
    process = None
    worker_traceback = getattr(error.__cause__, "tb", "")  # concurrent.futures has it there
    data_worker = DATA_WORKER.match(str(error))
    if data_worker is not None:
        kind = data_worker["kind"]
        process = data_worker["process"]
        worker_traceback = str(error)
    frames: list[tuple[str, int]] = []
    if isinstance(worker_traceback, str):
        for match in FRAME.finditer(worker_traceback):
            frames.append((match["file"], int(match["line"])))
    if not frames:
        for frame in traceback.extract_tb(error.__traceback__):
            frames.append((frame.filename, frame.lineno or 0))
    users_frames = [frame for frame in frames if is_users_file(frame[0])]
    file, line = (users_frames or frames)[-1]
    return ErrorOrigin(kind, file, line, bool(users_frames), process)


def message_of(error: BaseException) -> str:
    """Return the message of an error; of a DataLoader's error, what the worker's error said."""
    message = str(error)
    data_worker = DATA_WORKER.match(message)
    frames = list(FRAME.finditer(message))
    if data_worker is None or not frames:
        return message
    kind_and_message = message[frames[-1].end() :].strip()
    # A traceback qualifies the class by its module.
    return re.sub(rf"\A[\w.]*{data_worker['kind']}(: |\Z)", "", kind_and_message)


def is_users_file(file: str) -> bool:
    """Return whether a line of this file is for the user to correct."""
    path = Path(file)
    is_generated = not path.is_absolute() or COMPILED in file
    is_installed = any(folder in path.parts for folder in INSTALLED)
    is_foreign = PACKAGE in path.parents or STANDARD_LIBRARY in path.parents
    return not (is_generated or is_installed or is_foreign)
