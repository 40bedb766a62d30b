"""`anlit prepare CORPUS --output DIR`: from the hub, or from a copy of it, to token shards."""

import argparse
import os
import shlex
from pathlib import Path

from anlit.config.options import ToolParser, at_least, whole_number
from anlit.data.preparation.prepare import prepare
from anlit.data.preparation.recipes import BPE, RECIPES, Recipe, recipe_of
from anlit.data.preparation.tasks import PROGRESS_KEPT
from anlit.data.storage.manifest import MANIFEST
from anlit.errors import PREEMPTED, Preempted, UserError
from anlit.reporting.text import echo, say

EPILOG = """\
The same command goes on after an interruption, and repairs a finished folder that has lost chunks.
Any data set of the hub:
anlit prepare Hub --repo allenai/c4 --files 'en/*.json.gz' --output data/c4.
Many machines: docs/scale-out.md.
"""
COMMAND_OPTIONS = frozenset({"corpus", "output", "workers", "cluster", "on_bad", "verify"})
"""The options of the command; all others are fields of a recipe."""


def main(argv: list[str]) -> int:
    """Run the command; `argv` without its name."""
    arguments = parser().parse_args(argv)
    corpus = arguments.corpus
    folder_name = (arguments.repo or corpus).rpartition("/")[2].lower()
    output = arguments.output or f"data/{folder_name}"
    if arguments.cluster is not None:
        if arguments.workers is not None:
            raise UserError(
                "--workers counts processes of this machine, and --cluster has its own: "
                "leave one out"
            )
        output = os.path.abspath(output)  # the workers may have another working directory
    options = recipe_options(arguments)
    try:
        recipe = recipe_of(corpus, **options)
        if arguments.vocab_size is not None and recipe.tokenizer != BPE:
            raise UserError(
                f"--vocab_size {arguments.vocab_size} is of --tokenizer bpe, and the tokenizer is "
                f"{recipe.tokenizer}: leave one out"
            )
        was_finished = Path(output, MANIFEST).is_file()
        manifest = prepare(
            output,
            recipe,
            command_line(corpus, output, options, arguments.on_bad),
            workers=arguments.workers,
            cluster=arguments.cluster,
            skip_bad=arguments.on_bad == "skip",
            verify=arguments.verify,
        )
        if was_finished:
            tokens = f"{manifest['tokens']:,} tokens"
            say(f"{output} is finished, with {tokens}: nothing is left to do.")
    except KeyboardInterrupt as error:
        echo(f"Interrupted: {PROGRESS_KEPT}, repeat the command to go on.")
        return PREEMPTED if isinstance(error, Preempted) else 1
    return 0


def recipe_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options that become values of the recipe; None if the user has not typed them."""
    options = vars(arguments)
    return {name: options[name] for name in options if name not in COMMAND_OPTIONS}


def command_line(corpus: str, output: str, options: dict[str, object], on_bad: str) -> str:
    """Return the command that makes the same folder, without options that change nothing in it."""
    arguments = ["anlit", "prepare", corpus, "--output", output]
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is not None:
            arguments += [f"--{name}", str(value)]
    if on_bad != "stop":
        arguments += ["--on_bad", on_bad]
    return shlex.join(arguments)


def parser() -> ToolParser:
    """Return the parser. Options of a recipe are None by default: each corpus has another value."""
    parser = ToolParser(
        prog="anlit prepare", description="Turn a corpus into token shards.", epilog=EPILOG
    )
    add = parser.add_argument
    add("corpus", metavar="CORPUS", choices=list(RECIPES), help=", ".join(RECIPES))
    add("--output", metavar="DIR", help="the prepared folder (data/<corpus>)")
    add(
        "--workers",
        type=at_least(1),
        help="processes (one per core, within a container's limit of CPU time)",
    )
    add("--cluster", metavar="ADDRESS", help="work on a Dask cluster, such as tcp://scheduler:8786")
    add(
        "--on_bad",
        choices=("stop", "skip"),
        default="stop",
        help="what to do at a document that cannot be used (%(default)s)",
    )
    add(
        "--verify",
        action="store_true",
        help="read every chunk and source file of a finished folder",
    )
    _add_source_options(parser)
    _add_token_options(parser)
    return parser


def _add_source_options(parser: ToolParser) -> None:
    """Add the options that say where the files are."""
    add = parser.add_argument
    add("--source", metavar="DIR", help="a copy in the hub's own layout; without it, the hub")
    add("--repo", metavar="OWNER/NAME", help="Hub: the data set")
    add("--files", metavar="PATTERN", help="Hub: which files, such as 'en/*.json.gz'")
    add("--revision", help=f"the hub repository's branch, tag or commit ({Recipe.revision})")
    add("--part", help="FineWeb: sample-10BT or sample-100BT; FineWebBin: 10B or 100B")


def _add_token_options(parser: ToolParser) -> None:
    """Add the options that say how files become tokens."""
    add = parser.add_argument
    add(
        "--tokenizer",
        metavar="FILE",
        help="gpt2, gpt-neox, a tokenizer.json, bpe (trained on the corpus), or none",
    )
    add("--vocab_size", type=whole_number, help=f"tokens of --tokenizer bpe ({Recipe.vocab_size})")
    add("--end_of_document", help=f"the token that ends a document ({Recipe.end_of_document})")
    val_tokens = RECIPES["FineWeb"].val_tokens
    add("--val_tokens", type=at_least(1), help=f"FineWeb: tokens for validation ({val_tokens})")
    add(
        "--val_fraction",
        type=float,
        help="other corpora: share for validation (OpenWebText: 10,000 documents; else 0.05)",
    )
    add("--pattern", help=f"TextFiles: which files ({Recipe.pattern})")
    add("--text_field", help=f"the field that holds a document's text ({Recipe.text_field})")
    add(
        "--max_document_bytes",
        type=at_least(1),
        help=f"the longest document that is used ({Recipe.max_document_bytes})",
    )
    add(
        "--include_site_packages",
        action="store_true",
        default=None,
        help="PythonSources: installed packages too",
    )
