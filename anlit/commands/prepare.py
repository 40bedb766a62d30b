"""`anlit prepare CORPUS --output DIR`: from the hub, or from a copy of it, to token shards."""

import argparse
import os
import shlex
from dataclasses import fields
from pathlib import Path

from anlit.config.options import ToolParser, at_least, whole_number
from anlit.data.preparation.prepare import prepare
from anlit.data.preparation.recipes import CORPORA, Options, recipe_of
from anlit.data.storage.manifest import MANIFEST
from anlit.errors import PREEMPTED, Preempted, UserError
from anlit.reporting.text import echo, say

EPILOG = """\
The same command goes on after an interruption, and repairs a finished folder that has lost chunks. Any data set of the
hub: anlit prepare Hub --repo allenai/c4 --files 'en/*.json.gz' --output data/c4. Many machines: docs/scale-out.md.
"""


def main(argv: list[str]) -> int:
    """Run the command; `argv` without its name."""
    arguments = parser().parse_args(argv)
    known = {corpus.lower(): corpus for corpus in CORPORA}
    corpus = known.get(arguments.corpus.lower().replace("-", "").replace("_", ""))
    if corpus is None:
        raise UserError(
            f"There is no corpus {arguments.corpus}: choose one of {', '.join(CORPORA)}."
        )
    chosen = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    output = arguments.output or f"data/{(arguments.repo or corpus).rpartition('/')[2].lower()}"
    if arguments.cluster is not None:
        if arguments.workers is not None:
            raise UserError(
                "--workers counts processes of this machine, and --cluster has its own: leave one out."
            )
        output, chosen["source"] = (
            path and os.path.abspath(path) for path in (output, arguments.source)
        )
    try:
        recipe = recipe_of(corpus, Options(**chosen))
        finished = Path(output, MANIFEST).is_file()
        manifest = prepare(
            output,
            recipe,
            command_line(corpus, output, arguments),
            workers=arguments.workers,
            cluster=arguments.cluster,
            skip_bad=arguments.on_bad == "skip",
            verify=arguments.verify,
        )
        if finished:
            say(f"{output} is finished, with {manifest['tokens']:,} tokens: nothing is left to do.")
    except KeyboardInterrupt as end:
        echo("Interrupted: what is done so far is kept, repeat the command to go on.")
        return PREEMPTED if isinstance(end, Preempted) else 1
    return 0


def command_line(corpus: str, output: str, arguments: argparse.Namespace) -> str:
    """The command that makes the same folder, without what changes nothing in it."""
    words = ["anlit", "prepare", corpus, "--output", output]
    for field in fields(Options):
        if (value := getattr(arguments, field.name)) != field.default:
            words += [f"--{field.name}", *([] if value is True else [str(value)])]
    if arguments.on_bad != "stop":
        words += ["--on_bad", arguments.on_bad]
    return shlex.join(words)


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit prepare", description="Turn a corpus into token shards.", epilog=EPILOG
    )
    add = parser.add_argument
    add("corpus", help=", ".join(CORPORA))
    add("--output", metavar="DIR", help="the prepared folder (data/<corpus>)")
    add("--source", metavar="DIR", help="a copy in the hub's own layout; without it, the hub")
    add("--repo", metavar="OWNER/NAME", help="Hub: the data set")
    add("--files", metavar="PATTERN", help="Hub: which files, such as 'en/*.json.gz'")
    add(
        "--revision",
        default="main",
        help="the hub repository's branch, tag or commit (%(default)s)",
    )
    add("--part", help="FineWeb: sample-10BT or sample-100BT; FineWebBin: 10B or 100B")
    add(
        "--tokenizer",
        metavar="FILE",
        help="gpt2, gpt-neox, a tokenizer.json, bpe (trained on the corpus), or none",
    )
    add("--vocab_size", type=whole_number, default=4096, help="of --tokenizer bpe (%(default)s)")
    add("--end_of_document", default=Options.end_of_document, help="that token (%(default)s)")
    add("--workers", type=at_least(1), help="processes (one per core)")
    add("--cluster", metavar="ADDRESS", help="work on a Dask cluster, such as tcp://scheduler:8786")
    add(
        "--on_bad",
        choices=("stop", "skip"),
        default="stop",
        help="a document that cannot be used (%(default)s)",
    )
    add(
        "--max_document_bytes",
        type=at_least(1),
        default=Options.max_document_bytes,
        help="(%(default)s)",
    )
    add("--text_field", default="text", help="the field that holds a document's text (%(default)s)")
    add("--pattern", default=Options.pattern, help="TextFiles: which files (%(default)s)")
    add("--val_tokens", type=at_least(1), default=Options.val_tokens, help="FineWeb (%(default)s)")
    add("--val_fraction", type=float, help="others (OpenWebText: 10,000 documents; else 0.05)")
    add(
        "--include_site_packages", action="store_true", help="PythonSources: installed packages too"
    )
    add(
        "--verify",
        action="store_true",
        help="read every chunk and source file of a finished folder",
    )
    return parser
