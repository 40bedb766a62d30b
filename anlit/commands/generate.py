"""`anlit generate`: continuations of prompts, streamed to the terminal or as JSON lines."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from anlit.checkpoints.location import find_checkpoint
from anlit.commands.score import model_options, read_documents
from anlit.config.options import ToolParser, at_least
from anlit.errors import UserError
from anlit.reporting.text import echo, json_line

SURROGATE = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes in an argument that are not UTF-8."""
AS_UTF8 = "convert it, such as with iconv -f latin1 -t utf-8"


class PromptParser(ToolParser):
    """A parser whose prompts may follow options too, as in `anlit generate RUN --chat PROMPT`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, others = super().parse_known_args(args, namespace)
        prompts = [word for word in others if not word.startswith("-")]
        given.prompt = [*given.prompt, *prompts]
        return given, [word for word in others if word.startswith("-")]


def parser() -> ToolParser:
    parser = PromptParser(
        prog="anlit generate",
        description="Continues prompts with a trained model. A continuation depends on its prompt, the seed and the "
        "number of the sample, not on the other prompts.",
        epilog="Example: anlit generate runs/angpt-seed1 'def main():' --max_tokens 200 --temperature 0.8 --top_p 0.95",
    )
    model_options(parser)
    add = parser.add_argument
    add(
        "prompt",
        nargs="*",
        default=[],
        metavar="PROMPT",
        help="text to continue (default: standard input)",
    )
    add(
        "--prompts",
        metavar="FILE",
        help='text (one prompt), .jsonl of {"prompt": …}, or - for stdin',
    )
    add(
        "--max_tokens",
        type=at_least(1),
        default=100,
        metavar="N",
        help="tokens at most (default: 100)",
    )
    add(
        "--samples",
        type=at_least(1),
        default=1,
        metavar="N",
        help="continuations of each prompt (default: 1)",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="0 for the most probable token (default: 1)",
    )
    add("--top_k", type=at_least(1), metavar="K", help="draw among the K most probable tokens")
    add(
        "--top_p",
        type=float,
        metavar="P",
        help="draw among the fewest tokens that together have probability P",
    )
    add("--seed", type=at_least(0), default=0, help="seed of the random numbers (default: 0)")
    add(
        "--batch_size",
        type=at_least(1),
        default=8,
        metavar="N",
        help="continuations in a batch (default: 8)",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object per continuation, with tokens and log-likelihoods",
    )
    return parser


def main(argv: list[str]) -> None:
    given = parser().parse_args(argv)
    find_checkpoint(given.checkpoint)
    prompts = read_prompts(given.prompt, given.prompts, given.chat)

    from anlit.data.tokenizer import vocabulary_size
    from anlit.evaluation.chat import read_messages
    from anlit.evaluation.generation import Request, Sampling, generate
    from anlit.evaluation.text_stream import TextStream, decode_continuation
    from anlit.evaluation.tokenizer import load_tokenizer
    from anlit.training.load_model import load_checkpoint  # after the checks: torch takes seconds

    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
    checkpoint = load_checkpoint(given.checkpoint, given.device)
    text = load_tokenizer(checkpoint, given.tokenizer, given.special_tokens or given.chat)

    def encode(prompt: str) -> list[int]:
        if not given.chat:
            return text.encode_prompt(prompt, checkpoint)
        return text.encode(text.render_chat(read_messages(prompt)))

    def text_before(tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that an answer's text follows; an answer in a conversation stands alone."""
        return [] if given.chat else tokens

    begun = [encode(prompt) for prompt in prompts]
    requests = [Request(tokens, sample) for tokens in begun for sample in range(given.samples)]
    streams = len(requests) == 1 and not given.json
    stream = TextStream(text.tokenizer, text_before(begun[0]))

    def show(number: int, token: int) -> None:
        if streams:
            echo(stream.add(token), end="")

    if streams and not given.chat:
        echo(prompts[0], end="")
    decoder, n_allowed = checkpoint.model.model, vocabulary_size(text.tokenizer)
    continuations = generate(
        decoder,
        requests,
        given.max_tokens,
        sampling,
        text.inner_separator(checkpoint, given.chat),
        given.batch_size,
        n_allowed,
        show,
        text.stop_tokens,
    )
    for number, (request, own) in enumerate(zip(requests, continuations, strict=True)):
        prompt = prompts[number // given.samples]
        added = decode_continuation(text.tokenizer, text_before(request.prompt), own.tokens)
        if given.json:
            record = {
                "prompt": prompt,
                "prompt_tokens": list(request.prompt),
                "sample": request.sample,
            }
            echo(json_line({**record, "text": added, **vars(own)}))
        elif streams:
            echo(stream.finish())
        else:
            sample = f", sample {request.sample + 1}" if given.samples > 1 else ""
            shown = f"{prompt}\n{added}" if given.chat else f"{prompt}{added}"
            echo(f"--- prompt {number // given.samples + 1}{sample}\n{shown}\n")


def read_prompts(texts: Sequence[str], file: str | None, are_chats: bool = False) -> list[str]:
    """The prompts `texts` and those of `file`, read as `anlit score` reads texts; "-" is one on standard input.

    Without both, standard input is the prompt. Raises UserError if there is none, one is not UTF-8, or the file is
    damaged.
    """
    prompts = list(texts)
    if file not in (None, "-"):
        prompts += [prompt for prompt, _ in read_documents([file], "prompt", are_chats)]
    elif file == "-" or (not prompts and not sys.stdin.isatty()):
        prompts.append(_standard_input())
    if not prompts:
        raise UserError(
            "there is no prompt: give one as an argument, with --prompts FILE or on standard input"
        )
    for number, prompt in enumerate(prompts, 1):
        if SURROGATE.search(prompt):
            raise UserError(f"prompt {number} is not UTF-8: {AS_UTF8}")
    return prompts


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 ({error}): {AS_UTF8}") from error
