"""`anlit prepare CORPUS --output DIR`: from the hub, or from a copy of it, to token shards."""

import argparse
import shlex
from dataclasses import fields
from pathlib import Path

from anlit.data.preparation.catalogue import CORPORA, Options, recipe_of
from anlit.data.preparation.prepare import RunOptions, prepare
from anlit.data.storage.manifest import MANIFEST
from anlit.errors import UserError
from anlit.options import CommandParser
from anlit.reporting.text import echo, say

EPILOG = """\
The same command goes on after an interruption, and repairs a finished folder that has lost chunks. Several machines
share the work on a common file system with --shard 0/4, 1/4, 2/4, 3/4.
"""


def main(argv: list[str]) -> int:
    """Run the command; `argv` without its name."""
    arguments = _parser().parse_args(argv)
    corpus = _corpus(arguments.corpus)
    chosen = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    output = arguments.output or f"data/{corpus.lower()}"
    shard, shards = _shard(arguments.shard)
    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers must be at least 1, not {arguments.workers}.")
    options = RunOptions(
        workers=arguments.workers,
        shard=shard,
        shards=shards,
        skip_bad=arguments.on_bad == "skip",
        verify=arguments.verify,
        command=command_line(corpus, output, arguments),
    )
    try:
        recipe = recipe_of(corpus, Options(**chosen))
        finished = Path(output, MANIFEST).is_file()
        manifest = prepare(output, recipe, options)
        if finished and manifest is not None:
            say(f"{output} is finished, with {manifest['tokens']:,} tokens: nothing is left to do.")
    except KeyboardInterrupt:
        echo("Interrupted: what is done so far is kept, repeat the command to go on.")
        return 1
    return 0


def command_line(corpus: str, output: str, arguments: argparse.Namespace) -> str:
    """The command that makes the same folder, without what changes nothing in it."""
    words = ["anlit", "prepare", corpus, "--output", output]
    for field in fields(Options):
        value = getattr(arguments, field.name)
        if value == field.default:
            continue
        words += [f"--{field.name}", *([] if value is True else [str(value)])]
    if arguments.on_bad != "stop":
        words += ["--on_bad", arguments.on_bad]
    return shlex.join(words)


def _corpus(name: str) -> str:
    for corpus in CORPORA:
        if corpus.lower() == name.lower().replace("-", "").replace("_", ""):
            return corpus
    raise UserError(f"There is no corpus {name}: choose one of {', '.join(CORPORA)}.")


def _shard(text: str) -> tuple[int, int]:
    try:
        shard, shards = (int(part) for part in text.split("/"))
    except ValueError:
        shard, shards = -1, 0
    if not 0 <= shard < shards:
        raise UserError(f"--shard must be i/n with 0 ≤ i < n, such as 0/4, not {text}.")
    return shard, shards


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="anlit prepare",
        description="Turn a corpus into token shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("corpus", help=", ".join(CORPORA))
    parser.add_argument("--output", metavar="DIR", help="the prepared folder (data/<corpus>)")
    parser.add_argument("--source", metavar="DIR", help="a copy in the hub's own layout; without it, the hub")
    parser.add_argument("--revision", default="main", help="the hub repository's branch, tag or commit (%(default)s)")
    parser.add_argument("--part", help="FineWeb: sample-10BT or sample-100BT; FineWebBin: 10B or 100B")
    parser.add_argument("--tokenizer", help="gpt2, gpt-neox, a tokenizer.json, bpe (trained on the corpus), or none")
    parser.add_argument("--vocab_size", type=int, default=4096, help="of --tokenizer bpe (%(default)s)")
    parser.add_argument("--end_of_document", default=Options.end_of_document, help="that token (%(default)s)")
    parser.add_argument("--workers", type=int, help="processes (one per core)")
    parser.add_argument("--shard", default="0/1", metavar="i/n", help="part i of n, for several machines")
    parser.add_argument(
        "--on_bad", choices=("stop", "skip"), default="stop", help="a document that cannot be used (%(default)s)"
    )
    parser.add_argument("--max_document_bytes", type=int, default=Options.max_document_bytes, help="(%(default)s)")
    parser.add_argument("--text", default="text", help="the field that holds a document's text (%(default)s)")
    parser.add_argument("--pattern", default=Options.pattern, help="TextFiles: which files (%(default)s)")
    parser.add_argument("--val_tokens", type=int, default=Options.val_tokens, help="FineWeb (%(default)s)")
    parser.add_argument("--val_fraction", type=float, help="others (OpenWebText: 10,000 documents; else 0.05)")
    parser.add_argument("--include_site_packages", action="store_true", help="PythonSources: installed packages too")
    parser.add_argument("--verify", action="store_true", help="check every chunk's checksum in a finished folder")
    return parser
