"""`anlit generate`: continuations of prompts, streamed to the terminal or as JSON lines."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from anlit.checkpoints.location import find_checkpoint
from anlit.commands.garbage_collection import collector_paused
from anlit.commands.score import add_model_options
from anlit.config.options import ToolParser, at_least
from anlit.errors import UserError
from anlit.evaluation.documents import (
    AS_UTF8,
    STANDARD_INPUT,
    SURROGATE,
    read_documents,
    read_standard_input,
)
from anlit.reporting.text import echo, json_line


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit generate",
        description="Continues prompts with a trained model. A continuation depends on its prompt, "
        "the seed and the number of the sample, not on the other prompts.",
        epilog="Example: anlit generate runs/angpt-seed1 'def main():' --max_tokens 200 "
        "--temperature 0.8 --top_p 0.95",
    )
    add_model_options(parser)
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
    add(
        "--interactive",
        action="store_true",
        help="answer a line at a time, from the terminal or standard input; with --chat they are "
        "a conversation",
    )
    return parser


def main(argv: list[str]) -> None:
    options = parser().parse_intermixed_args(argv)  # prompts after options too
    find_checkpoint(options.checkpoint)
    prompts: list[str] = []
    if options.interactive:
        _refuse_prompts(options)
    else:
        prompts = read_prompts(options.prompt, options.prompts, options.chat)

    with collector_paused():  # after the checks: torch takes seconds
        from anlit.commands.interactive import Dialogue, converse
        from anlit.evaluation.tokenizer import load_checkpoint_tokenizer
        from anlit.training.load_model import load_checkpoint

    checkpoint = load_checkpoint(options.checkpoint, options.device)
    tokenizer = load_checkpoint_tokenizer(
        checkpoint, options.tokenizer, options.special_tokens or options.chat
    )
    if options.interactive:
        converse(options, tokenizer)
    elif len(prompts) == 1 and options.samples == 1 and not options.json:
        Dialogue(options, tokenizer).answer(prompts[0])
    else:
        print_continuations(options, prompts, tokenizer)


def print_continuations(
    options: argparse.Namespace, prompts: Sequence[str], tokenizer: Any
) -> None:
    """Print several continuations when they are done, as text or as JSON."""
    from anlit.evaluation.generation import Request, Sampling
    from anlit.evaluation.text_generation import continue_requests
    from anlit.evaluation.text_stream import decode_continuation

    requests = []
    for prompt in prompts:
        tokens = _encode_prompt(prompt, tokenizer, options.chat)
        requests += [Request(tokens, sample) for sample in range(options.samples)]
    continuations = continue_requests(
        tokenizer,
        requests,
        options.max_tokens,
        Sampling(options.temperature, options.top_k, options.top_p, options.seed),
        is_chat=options.chat,
        batch_size=options.batch_size,
    )
    for number, (request, result) in enumerate(zip(requests, continuations, strict=True)):
        prompt_number = number // options.samples
        prompt = prompts[prompt_number]
        context = _text_context(request, options.chat)
        generated_text = decode_continuation(tokenizer.tokenizer, context, result.tokens)
        if options.json:
            record = {
                "prompt": prompt,
                "prompt_tokens": list(request.prompt),
                "sample": request.sample,
                "text": generated_text,
            }
            echo(json_line({**record, **vars(result)}))
        else:
            sample = f", sample {request.sample + 1}" if options.samples > 1 else ""
            separator = "\n" if options.chat else ""
            echo(f"--- prompt {prompt_number + 1}{sample}\n{prompt}{separator}{generated_text}\n")


def _refuse_prompts(options: argparse.Namespace) -> None:
    """Raise UserError for an option that does not go with `--interactive`."""
    unfit = {
        "PROMPT": options.prompt,
        "--prompts": options.prompts,
        "--samples": options.samples > 1,
        "--json": options.json,
    }
    for name, value in unfit.items():
        if value:
            raise UserError(f"{name} does not go with --interactive: leave one of them out")


def _encode_prompt(prompt: str, tokenizer: Any, is_chat: bool) -> list[int]:
    """Return the tokens of a prompt; of a conversation by the model's chat template."""
    from anlit.evaluation.chat import read_messages

    if is_chat:
        return tokenizer.encode_chat(read_messages(prompt))
    return tokenizer.encode_prompt(prompt)


def _text_context(request: Any, is_chat: bool) -> Sequence[int]:
    """Return the tokens that the generated text follows. An answer in a conversation has none."""
    return [] if is_chat else request.prompt


def read_prompts(texts: Sequence[str], file: str | None, are_chats: bool = False) -> list[str]:
    """Return the prompts `texts`, and the prompts in `file`, which is read as `anlit score` does.

    The file "-" is standard input as one prompt. It is read too if there are no prompts at all.
    Raises UserError if there is no prompt, a prompt is not UTF-8, or the file is damaged.
    """
    prompts = list(texts)
    if file not in (None, STANDARD_INPUT):
        prompts += [prompt for prompt, _ in read_documents([file], "prompt", are_chats)]
    elif file == STANDARD_INPUT or (not prompts and not sys.stdin.isatty()):
        prompts.append(read_standard_input())
    if not prompts:
        fix = "give one as an argument, with --prompts FILE or on standard input"
        raise UserError(f"there is no prompt: {fix}")
    for number, prompt in enumerate(prompts, 1):
        if SURROGATE.search(prompt):
            raise UserError(f"prompt {number} is not UTF-8: {AS_UTF8}")
    return prompts
