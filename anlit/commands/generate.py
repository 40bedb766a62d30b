"""`anlit generate`: continuations of prompts, streamed to the terminal or as JSON lines."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from anlit.checkpoints.location import require_path
from anlit.errors import UserError
from anlit.options import CommandParser
from anlit.reading import read_text
from anlit.reporting.text import echo, json_line

if TYPE_CHECKING:
    from anlit.inference.generation import OnToken
    from anlit.inference.text import CheckpointTokenizer


def read_prompts(texts: Sequence[str], file: str | None, stdin: TextIO) -> list[str]:
    """Prompts from the command line, from a file, or from standard input if there is neither.

    Args:
        texts: The prompts of the command line.
        file: `.jsonl` with a {"prompt": "…"} per line, `-` for standard input, or any other text file, which is one
            prompt.
        stdin: Standard input; all of it is one prompt.

    Raises:
        UserError: There is no prompt, or the file cannot be read.
    """
    prompts = list(texts)
    if file is not None and file != "-":
        prompts += _from_file(Path(file))
    elif file == "-" or (not prompts and not stdin.isatty()):
        prompts.append(stdin.read())
    if not prompts:
        raise UserError("there is no prompt: give one as an argument, with --prompts FILE or on standard input")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} of {len(prompts)} is empty: give at least one token of text to continue")
    return prompts


def _from_file(path: Path) -> list[str]:
    try:
        content = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8, or too large"
        raise UserError(f"--prompts {path} cannot be read ({reason}): give a text file or .jsonl") from error
    if path.suffix != ".jsonl":
        return [content]
    prompts = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                prompts.append(str(json.loads(line)["prompt"]))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f'{path}, line {number} is no prompt: write {{"prompt": "text"}} in every line'
                ) from error
    return prompts


def _stream(header: str, text: "CheckpointTokenizer", out: TextIO) -> "OnToken":
    """Print the header, and return what prints the tokens of the only continuation as they come."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)  # waits until all bytes of a character are there
    echo(header, out, end="")

    def on_token(number: int, token: int | None) -> None:
        echo("\n" if token is None else stream.step(text.tokenizer, token) or "", out, end="")

    return on_token


def generate(arguments: argparse.Namespace, stdin: TextIO, out: TextIO) -> None:
    """Continue the prompts and print the result."""
    if arguments.max_tokens < 1 or arguments.samples < 1 or arguments.batch_size < 1:
        raise UserError("--max_tokens, --samples and --batch_size must be at least 1")
    require_path(arguments.checkpoint)
    prompts = read_prompts(arguments.prompt, arguments.prompts, stdin)

    from anlit.checkpoints.loading import load_checkpoint  # after the checks: torch takes seconds
    from anlit.inference import generation
    from anlit.inference.sampling import Sampling
    from anlit.inference.text import text_of

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    checkpoint = load_checkpoint(arguments.checkpoint, arguments.device)
    text = text_of(checkpoint, arguments.tokenizer)
    asked = [(prompt, sample) for prompt in prompts for sample in range(arguments.samples)]
    requests = [generation.Request(text.prompt(prompt, checkpoint), sample) for prompt, sample in asked]
    streams = len(requests) == 1 and not arguments.json
    on_token = _stream(prompts[0], text, out) if streams else lambda number, token: None
    decoder, batch_size = checkpoint.model.model, arguments.batch_size
    found = generation.generate(
        decoder, requests, arguments.max_tokens, sampling, text.ending, batch_size, text.size, on_token
    )
    for number, ((prompt, sample), request, one) in enumerate(zip(asked, requests, found, strict=True)):
        continuation = text.decode(one.tokens)
        if arguments.json:
            record = {"prompt": prompt, "prompt_tokens": list(request.prompt), "sample": sample, "text": continuation}
            echo(json_line({**record, **vars(one)}), out)
        elif not streams:
            name = f"prompt {number // arguments.samples + 1}"
            name += f", sample {sample + 1}" if arguments.samples > 1 else ""
            echo(f"--- {name}\n{prompt}{continuation}\n", out)


def main(argv: list[str]) -> int:
    """`anlit generate`; returns the exit status and raises UserError for the user's mistakes."""
    parser = CommandParser(
        prog="anlit generate",
        description="Continues prompts with a trained model. A continuation depends on its prompt, the seed and the "
        "number of the sample, not on the other prompts.",
        epilog="Example: anlit generate runs/angpt-seed1 'def main():' --max_tokens 200 --temperature 0.8 --top_p 0.95",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="run folder (its best checkpoint), .ckpt file or exported folder")
    add("prompt", nargs="*", metavar="PROMPT", help="text to continue (default: standard input)")
    add("--prompts", metavar="FILE", help='.jsonl of {"prompt": …}, a text file, or - for stdin')
    add("--max_tokens", type=int, default=100, metavar="N", help="the most tokens of a continuation (default: 100)")
    add("--samples", type=int, default=1, metavar="N", help="continuations of each prompt (default: 1)")
    add("--temperature", type=float, default=1.0, metavar="X", help="0 for the most probable token (default: 1)")
    add("--top_k", type=int, metavar="K", help="draw among the K most probable tokens")
    add("--top_p", type=float, metavar="P", help="draw among the fewest tokens that together have probability P")
    add("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    add("--batch_size", type=int, default=8, metavar="N", help="continuations in a batch (default: 8)")
    add("--json", action="store_true", help="print one JSON object per continuation, with tokens and log-likelihoods")
    add("--tokenizer", metavar="FILE", help="tokenizer.json (default: that of the checkpoint's data)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    generate(parser.parse_args(argv), sys.stdin, sys.stdout)
    return 0
