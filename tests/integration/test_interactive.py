"""`anlit generate --interactive` in a terminal and in a pipe."""

import codecs
import fcntl
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anlit.cli import main
from anlit.reporting.text import PLAIN_CONTROLS, without_control_codes
from tests.data.processes import PATIENCE_S
from tests.evaluation.test_generate_command import generate_records

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
REFUSING = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
CTRL_C = b"\x03"
CTRL_D = b"\x04"
UP = b"\x1b[A"
PROMPT = ">>> "
LONGEST_PIECE = 20
"""Characters of any token, and more."""
GREEDY = ("--temperature=0", "--device=cpu")
Capture = pytest.CaptureFixture[str]


class Terminal:
    """A process in a pseudo-terminal, typed to and read by a test."""

    def __init__(self, *arguments: object) -> None:
        self._number, terminal = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "anlit", *map(str, arguments)],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C reaches it
        )
        os.close(terminal)
        self._unread = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def type(self, keys: bytes) -> None:
        os.write(self._number, keys)

    def read_until(self, mark: str, seconds: float = PATIENCE_S) -> str:
        """What the terminal shows up to and with `mark`."""
        assert self._shows(lambda: mark in self._unread, seconds), (
            f"no {mark!r} in {self._unread!r}"
        )
        shown, _, self._unread = self._unread.partition(mark)
        return shown + mark

    def type_at_prompt(self, keys: bytes) -> str:
        """What the terminal shows up to the prompt, which alone waits for keys; type them there.

        Keys that come earlier meet the terminal's own line mode, where Ctrl-D is lost.
        """
        shown = self.read_until(PROMPT)
        self.type(keys)
        return shown

    def interrupt_prompt(self, mark: str) -> str:
        """Type Ctrl-C at a prompt, again if Python was not waiting for a key. Read to `mark`."""
        for _ in range(40):
            self.type(CTRL_C)
            if self._shows(lambda: mark in self._unread, seconds=15):
                break
        return self.read_until(mark)

    def stop_answer(self, n_characters: int) -> None:
        """Type Ctrl-C after so much text of an answer, unless it has ended."""
        assert self._shows(
            lambda: len(self._unread) >= n_characters or PROMPT in self._unread, PATIENCE_S
        )
        if PROMPT not in self._unread:
            self.type(CTRL_C)

    def _shows(self, is_shown: Callable[[], bool], seconds: float) -> bool:
        """Read until `is_shown`, at most for some seconds; return whether it is."""
        end = time.monotonic() + seconds
        while not is_shown():
            ready, _, _ = select.select([self._number], [], [], max(0, end - time.monotonic()))
            if not ready:
                return False
            shown = self._decoder.decode(os.read(self._number, 4096))
            self._unread = (self._unread + shown).replace("\r\n", "\n")
        return True

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._number)


@contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    process = Terminal(*arguments)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def chat_folder(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model with a chat template."""
    folder = tmp_path_factory.mktemp("exported") / "chat"
    assert main(["export", str(finished), f"--output={folder}"]) == 0
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def answers(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: object
) -> str:
    """The output of a session with these lines in a pipe."""
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    capsys.readouterr()
    assert main(["generate", *map(str, arguments), "--interactive"]) == 0
    return capsys.readouterr().out


def as_printed(text: str) -> str:
    return without_control_codes(text, PLAIN_CONTROLS)


def chat_text(capsys: Capture, folder: Path, messages: list[dict[str, str]], *options: str) -> str:
    """The answer of `anlit generate --chat` to a conversation."""
    (record,) = generate_records(
        capsys, folder, "--chat", json.dumps(messages), *GREEDY, "--max_tokens=12", *options
    )
    return str(record["text"])


def test_a_line_is_a_prompt_in_a_pipe(
    finished: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--max_tokens=12", "--seed=3", "--device=cpu")
    first, _ = generate_records(capsys, finished, "import os", *settings, "--samples=2")
    _, second = generate_records(capsys, finished, "def f(", *settings, "--samples=2")

    printed = answers(capsys, monkeypatch, "import os\n\n  \ndef f(", finished, *settings)

    assert printed == as_printed(f"import os{first['text']}\ndef f({second['text']}\n")


def test_a_conversation_goes_on_until_it_is_cleared(
    chat_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_message = {"role": "user", "content": "hello"}
    first = chat_text(capsys, chat_folder, [first_message])
    second_message = {"role": "user", "content": "again"}
    turns = [first_message, {"role": "assistant", "content": first}, second_message]
    second = chat_text(capsys, chat_folder, turns)
    assert second != chat_text(capsys, chat_folder, [second_message])

    options = (chat_folder, "--chat", *GREEDY, "--max_tokens=12")
    lines = "hello\nagain\n/clear\nhello\n/bye\nnever read\n"
    printed = answers(capsys, monkeypatch, lines, *options)

    assert printed == as_printed(f"{first}\n{second}\n{first}\n")


def test_a_terminal_answers_stops_and_ends(finished: Path, capsys: Capture) -> None:
    (record,) = generate_records(capsys, finished, "import os", *GREEDY, "--max_tokens=2000")
    assert record["finish"] == "length", "the answer is long enough to be stopped"
    beginning = as_printed(record["text"])[:100]

    with terminal("generate", finished, "--interactive", *GREEDY, "--max_tokens=20000") as screen:
        assert "/? lists what you can do" in screen.type_at_prompt(b"\r")
        screen.type_at_prompt(b"import os\r")
        screen.read_until(f"import os\nimport os{beginning}")
        screen.type(CTRL_C)
        stopped = screen.read_until(PROMPT)
        assert len(stopped) < 20_000
        screen.interrupt_prompt("Ctrl-D or /bye ends")
        screen.type_at_prompt(UP + b"\r")
        screen.read_until(f"import os\nimport os{beginning}")
        screen.type(CTRL_C)
        screen.type_at_prompt(b"/?\r")
        assert "Ctrl-C  stops an answer" in screen.type_at_prompt(CTRL_D)
        assert screen.process.wait(PATIENCE_S) == 0


def test_a_stopped_answer_stays_in_the_conversation(chat_folder: Path, capsys: Capture) -> None:
    options = ("--chat", *GREEDY, "--max_tokens=20000")
    with terminal("generate", chat_folder, "--interactive", *options) as screen:
        screen.type_at_prompt(b"hello\r")
        screen.read_until("hello\n")
        screen.stop_answer(20)
        stopped = screen.type_at_prompt(b"again\r")
        screen.read_until("again\n")
        screen.stop_answer(300)  # more text than the 12 tokens that are compared
        second = screen.read_until(PROMPT)

    whole = chat_text(
        capsys, chat_folder, [{"role": "user", "content": "hello"}], "--max_tokens=2000"
    )
    shown = stopped.removesuffix(f"\n\n{PROMPT}").replace("^C", "", 1)
    n_shown = next(n for n in range(len(whole)) if as_printed(whole[:n]) == shown)
    answers_to_compare: list[str] = []
    # Ctrl-C may come after the answer has its next piece, and before that is shown.
    for n_characters in range(n_shown, n_shown + LONGEST_PIECE + 1):
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": whole[:n_characters]},
            {"role": "user", "content": "again"},
        ]
        answers_to_compare.append(as_printed(chat_text(capsys, chat_folder, messages)))
        if second.startswith(answers_to_compare[-1]):
            return
    raise AssertionError(f"{second!r} begins with none of {answers_to_compare}")


def test_a_terminal_goes_on_after_an_error(chat_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "chat"
    copy.mkdir()
    for file in chat_folder.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "tokenizer_config.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": REFUSING + TEMPLATE}))

    with terminal("generate", copy, "--chat", "--interactive", "--max_tokens=3") as screen:
        screen.type_at_prompt(b"hello\r")
        screen.type_at_prompt(b"again\r")
        message = screen.type_at_prompt(b"/clear\r")
        assert "does not render this conversation (one message only)" in message
        screen.type_at_prompt(b"hello\r")
        assert "one message only" not in screen.type_at_prompt(CTRL_D)
        assert screen.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["import os"], "PROMPT does not go with --interactive: leave one of them out"),
        (["--json"], "--json does not go with --interactive"),
        (["--chat"], "--chat needs a chat template, and the model has none"),
        (["--top_p=0"], "top_p 0 must be a probability"),
    ],
)
def test_mistakes_are_a_single_sentence(
    finished: Path,
    refusal: Any,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    assert sentence in refusal("generate", finished, "--interactive", *arguments)


def test_a_pipe_that_is_not_utf8_is_a_single_sentence(
    finished: Path, refusal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xe9b"), encoding="utf-8"))

    assert "standard input is not UTF-8" in refusal("generate", finished, "--interactive")
