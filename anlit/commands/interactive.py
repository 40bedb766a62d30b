"""`anlit generate --interactive`: answers a line at a time, from a terminal or from a pipe."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from anlit.errors import UserError
from anlit.evaluation.chat import Message, read_messages
from anlit.evaluation.documents import AS_UTF8, SURROGATE
from anlit.evaluation.generation import Request, Sampling
from anlit.evaluation.text_generation import continue_requests
from anlit.evaluation.text_stream import TextStream
from anlit.evaluation.tokenizer import CheckpointTokenizer
from anlit.reporting.text import echo

MARK = ">>> "
"""What a terminal shows where a prompt can be typed."""
END = "/bye"
NEW_CONVERSATION = "/clear"
HELP = "/?"
END_HINT = f"Ctrl-D or {END} ends"
COMMANDS = f"""\
  Ctrl-C  stops an answer; what it has said stays in a conversation
  {NEW_CONVERSATION}  begins a new conversation (--chat)
  {END}    ends, as Ctrl-D does"""


class Dialogue:
    """Answers lines, each by itself or with `--chat` as a conversation.

    The n-th answer is sample n of its prompt, as in `anlit generate --samples`.
    """

    def __init__(self, options: argparse.Namespace, tokenizer: CheckpointTokenizer) -> None:
        """Raises UserError if a conversation is wanted and the model has no template."""
        self.options = options
        self.tokenizer = tokenizer
        self.sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        self.messages: list[Message] = []
        self.n_answers = 0
        if options.chat:
            tokenizer.chat_template  # noqa: B018  its error matters

    def run_in_terminal(self) -> None:
        """Answer what is typed, until Ctrl-D or /bye. Ctrl-C stops an answer, and not the program.

        Everything that Ctrl-C may interrupt is inside of `try`.
        """
        with suppress(ImportError):
            import readline  # noqa: F401  input() has a history and can be edited
        notice = f"{self.tokenizer.checkpoint.label}: {HELP} lists what you can do\n"
        while True:
            line = None
            try:
                echo(notice, end="")
                notice = ""
                line = input(MARK)
                if not self.take(line):
                    return
                echo()
            except EOFError:
                echo()
                return
            except KeyboardInterrupt:
                notice = f"\n{END_HINT}\n" if line is None else "\n\n"
            except (UserError, UnicodeDecodeError) as error:
                notice = f"{error}\n"

    def run_in_pipe(self) -> None:
        """Answer the lines of standard input. An error ends it, and so does Ctrl-C."""
        try:
            for line in iter(sys.stdin.readline, ""):
                if not self.take(line.removesuffix("\n")):
                    return
        except UnicodeDecodeError as error:
            raise UserError(f"standard input is not UTF-8 ({error}): {AS_UTF8}") from error

    def take(self, line: str) -> bool:
        """Carry out a command, or print the answer to a prompt; return whether to go on."""
        command = line.strip()
        if command == END:
            return False
        if command == HELP:
            echo(COMMANDS)
        elif command == NEW_CONVERSATION and self.options.chat:
            self.messages = []
        elif SURROGATE.search(line):
            raise UserError(f"the prompt is not UTF-8: {AS_UTF8}")
        elif command:
            self.answer(line)
        return True

    def answer(self, prompt: str) -> None:
        """Print a prompt with its continuation, or with `--chat` the answer to a message."""
        if self.options.chat:
            self._answer_message(prompt)
            return
        tokens = self.tokenizer.encode_prompt(prompt)
        echo(prompt, end="")
        self._answer(tokens, tokens, [])

    def _answer_message(self, line: str) -> None:
        """Answer a message. Messages and answer stay, if the answer has text; else both go."""
        messages = [*self.messages, *read_messages(line)]
        tokens = self.tokenizer.encode_chat(messages)
        pieces: list[str] = []
        try:
            self._answer(tokens, [], pieces)
        finally:
            answer = "".join(pieces)
            if answer:
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _answer(self, tokens: list[int], context: Sequence[int], pieces: list[str]) -> None:
        """Print the continuation of `tokens` while it comes, and add its text to `pieces`.

        `context` are the tokens that the text follows; an answer in a conversation has none.
        """
        stream = TextStream(self.tokenizer.tokenizer, context)

        def show(piece: str) -> None:
            pieces.append(piece)
            echo(piece, end="")

        request = Request(tokens, self.n_answers)
        self.n_answers += 1
        continue_requests(
            self.tokenizer,
            [request],
            self.options.max_tokens,
            self.sampling,
            is_chat=self.options.chat,
            on_token=lambda number, token: show(stream.add(token)),
        )
        show(stream.finish())
        echo()


def converse(options: argparse.Namespace, tokenizer: CheckpointTokenizer) -> None:
    """Answer what comes from the terminal or from the pipe on standard input."""
    dialogue = Dialogue(options, tokenizer)
    if sys.stdin.isatty():
        dialogue.run_in_terminal()
    else:
        dialogue.run_in_pipe()
