"""`anlit prepare CORPUS --output DIR`: from the hub, or from a copy of it, to token shards."""

import argparse
import os
import shlex
from dataclasses import fields
from pathlib import Path

from anlit.data.preparation.prepare import RunOptions, prepare
from anlit.data.preparation.recipes import CORPORA, Options, recipe_of
from anlit.data.storage.manifest import MANIFEST
from anlit.errors import UserError
from anlit.reporting.text import echo, say
from anlit.sentences import ToolParser

EPILOG = """\
The same command goes on after an interruption, and repairs a finished folder that has lost chunks. Any data set of the
hub: anlit prepare Hub --repo allenai/c4 --files 'en/*.json.gz' --output data/c4. Many machines: docs/scale-out.md.
"""


def main(argv: list[str]) -> int:
    """Run the command; `argv` without its name."""
    arguments = parser().parse_args(argv)
    corpus = _corpus(arguments.corpus)
    chosen = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    output = arguments.output or f"data/{(arguments.repo or corpus).rpartition('/')[2].lower()}"
    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers must be at least 1, not {arguments.workers}.")
    if arguments.cluster is not None:
        if arguments.workers is not None:
            raise UserError("--workers counts processes of this machine, and --cluster has its own: leave one out.")
        output, chosen["source"] = (path and os.path.abspath(path) for path in (output, arguments.source))
    options = RunOptions(
        workers=arguments.workers,
        cluster=arguments.cluster,
        skip_bad=arguments.on_bad == "skip",
        verify=arguments.verify,
        command=command_line(corpus, output, arguments),
    )
    try:
        recipe = recipe_of(corpus, Options(**chosen))
        finished = Path(output, MANIFEST).is_file()
        manifest = prepare(output, recipe, options)
        if finished:
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


def parser() -> ToolParser:
    """The options of the command."""
    parser = ToolParser(
        prog="anlit prepare",
        description="Turn a corpus into token shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("corpus", help=", ".join(CORPORA))
    parser.add_argument("--output", metavar="DIR", help="the prepared folder (data/<corpus>)")
    parser.add_argument("--source", metavar="DIR", help="a copy in the hub's own layout; without it, the hub")
    parser.add_argument("--repo", metavar="OWNER/NAME", help="Hub: the data set")
    parser.add_argument("--files", metavar="PATTERN", help="Hub: which files, such as 'en/*.json.gz'")
    parser.add_argument("--revision", default="main", help="the hub repository's branch, tag or commit (%(default)s)")
    parser.add_argument("--part", help="FineWeb: sample-10BT or sample-100BT; FineWebBin: 10B or 100B")
    parser.add_argument("--tokenizer", help="gpt2, gpt-neox, a tokenizer.json, bpe (trained on the corpus), or none")
    parser.add_argument("--vocab_size", type=int, default=4096, help="of --tokenizer bpe (%(default)s)")
    parser.add_argument("--end_of_document", default=Options.end_of_document, help="that token (%(default)s)")
    parser.add_argument("--workers", type=int, help="processes (one per core)")
    parser.add_argument("--cluster", metavar="ADDRESS", help="work on a Dask cluster, such as tcp://scheduler:8786")
    parser.add_argument(
        "--on_bad", choices=("stop", "skip"), default="stop", help="a document that cannot be used (%(default)s)"
    )
    parser.add_argument("--max_document_bytes", type=int, default=Options.max_document_bytes, help="(%(default)s)")
    parser.add_argument("--text_field", default="text", help="the field that holds a document's text (%(default)s)")
    parser.add_argument("--pattern", default=Options.pattern, help="TextFiles: which files (%(default)s)")
    parser.add_argument("--val_tokens", type=int, default=Options.val_tokens, help="FineWeb (%(default)s)")
    parser.add_argument("--val_fraction", type=float, help="others (OpenWebText: 10,000 documents; else 0.05)")
    parser.add_argument("--include_site_packages", action="store_true", help="PythonSources: installed packages too")
    parser.add_argument("--verify", action="store_true", help="check every chunk's checksum in a finished folder")
    return parser
