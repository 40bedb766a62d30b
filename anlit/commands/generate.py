"""`anlit generate`: continuations of prompts, streamed to the terminal or as JSON lines."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from anlit.checkpoints.location import require_path
from anlit.errors import UserError
from anlit.options import CommandParser

if TYPE_CHECKING:
    from anlit.checkpoints.loading import Checkpoint
    from anlit.inference.generation import Continuation, OnToken
    from anlit.inference.text import Text


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or tokens for a model without a tokenizer."""

    text: str | None
    tokens: Sequence[int] | None = None


def read_prompts(texts: Sequence[str], file: str | None, stdin: TextIO) -> list[Prompt]:
    """Prompts from the command line, from a file, or from standard input if there is neither.

    Args:
        texts: The prompts of the command line.
        file: `.jsonl` with a {"prompt": "…"} or {"tokens": [1, 2]} per line, `-` for standard input, or any other text
            file, which is one prompt.
        stdin: Standard input; all of it is one prompt.

    Raises:
        UserError: There is no prompt, or the file cannot be read.
    """
    prompts = [Prompt(text) for text in texts]
    if file is not None and file != "-":
        prompts += _from_file(Path(file))
    elif file == "-" or (not prompts and not stdin.isatty()):
        prompts.append(Prompt(stdin.read()))
    if not prompts:
        raise UserError("there is no prompt: give one as an argument, with --prompts FILE or on standard input")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.text and not prompt.tokens:
            raise UserError(f"prompt {number} of {len(prompts)} is empty: give at least one token of text to continue")
    return prompts


def _from_file(path: Path) -> list[Prompt]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--prompts {path} cannot be read ({reason}): give a text file or .jsonl") from error
    if path.suffix != ".jsonl":
        return [Prompt(content)]
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    return [_from_line(line, f"{path}, line {number}") for number, line in lines]


def _from_line(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    text, tokens = (record.get("prompt"), record.get("tokens")) if isinstance(record, dict) else (None, None)
    if isinstance(text, str) and tokens is None:
        return Prompt(text)
    if text is None and isinstance(tokens, list) and all(isinstance(token, int) for token in tokens):
        return Prompt(None, tokens)
    raise UserError(f'{where} is no prompt: write {{"prompt": "text"}} or {{"tokens": [1, 2, 3]}} in every line')


def _stream(header: str, text: "Text | None", out: TextIO) -> "OnToken":
    """Print the header, and return what prints the tokens of the only continuation as they come."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)  # waits until all bytes of a character are there
    out.write(header)

    def on_token(number: int, token: int | None) -> None:
        if token is None:
            out.write("\n")
        else:
            out.write(f" {token}" if text is None else stream.step(text.tokenizer, token) or "")
        out.flush()

    return on_token


def generate(arguments: argparse.Namespace, stdin: TextIO, out: TextIO) -> list[dict[str, Any]]:
    """Continue the prompts and print the result; returns the records of the JSON lines."""
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
    needs_text = arguments.tokenizer is not None or any(prompt.tokens is None for prompt in prompts)
    text = text_of(checkpoint, arguments.tokenizer) if needs_text else None
    tokens = [prompt.tokens or _encode(prompt, text, checkpoint) for prompt in prompts]
    requests = [
        generation.Request(prompt_tokens, sample) for prompt_tokens in tokens for sample in range(arguments.samples)
    ]
    ending = text.ending if text is not None else generation.Ending()
    headers = [_header(prompts, number, arguments.samples) for number in range(len(requests))]
    streams = len(requests) == 1 and not arguments.json
    on_token = _stream(headers[0], text, out) if streams else lambda number, token: None
    found = generation.generate(
        checkpoint.model.model,
        requests,
        arguments.max_tokens,
        sampling,
        ending,
        arguments.batch_size,
        text.size if text is not None else None,
        on_token,
    )
    records = [
        _record(prompts[number // arguments.samples], request, continuation, text)
        for number, (request, continuation) in enumerate(zip(requests, found, strict=True))
    ]
    if arguments.json:
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif not streams:
        for header, record in zip(headers, records, strict=True):
            numbers = "".join(f" {token}" for token in record["tokens"])
            out.write(f"{header}{numbers if text is None else record['text']}\n")
    return records


def _encode(prompt: Prompt, text: "Text | None", checkpoint: "Checkpoint") -> list[int]:
    assert text is not None
    assert prompt.text is not None
    return text.prompt(prompt.text, checkpoint)


def _header(prompts: Sequence[Prompt], number: int, samples: int) -> str:
    """The text before a continuation: its prompt and, if there are several, which one it is."""
    prompt = prompts[number // samples]
    shown = prompt.text if prompt.text is not None else " ".join(map(str, prompt.tokens or ()))
    if len(prompts) * samples == 1:
        return shown
    name = f"prompt {number // samples + 1}" + (f", sample {number % samples + 1}" if samples > 1 else "")
    return ("\n" if number else "") + f"--- {name}\n{shown}"


def _record(prompt: Prompt, request: Any, continuation: "Continuation", text: "Text | None") -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "prompt_tokens": list(request.prompt),
        "sample": request.sample,
        "text": text.decode(continuation.tokens) if text is not None else None,
        "tokens": continuation.tokens,
        "log_likelihood": continuation.log_likelihood,
        "finish": continuation.finish,
    }


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
    add("--prompts", metavar="FILE", help='.jsonl of {"prompt": …} or {"tokens": […]}, a text file, or - for stdin')
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
