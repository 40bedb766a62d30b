"""`anlit import`: a checkpoint of transformers, such as a Qwen3 or a Llama, as a GPT+."""

from pathlib import Path

from anlit.commands.garbage_collection import collector_paused
from anlit.commands.shard_size import add_shard_size
from anlit.config.options import ToolParser, at_least
from anlit.hub.families import FAMILIES
from anlit.reporting.text import echo


def parser() -> ToolParser:
    """The options of `anlit import`. A new family belongs in `anlit.hub.families`."""
    family_names = ", ".join(family.name for family in FAMILIES.values())
    parser = ToolParser(
        prog="anlit import",
        description="Reads a model of transformers (config.json, safetensors, tokenizer.json) as a "
        "GPT+ into a folder that anlit generate, score, lengths, needle, diagnose and export take. "
        "anlit fit goes on from it with --config DIR/model.yaml, --initial_weights DIR and a low "
        f"rate, such as --model.optimizer.lr 3e-5. Families: {family_names}.",
        epilog="Example: anlit import Qwen3-1.7B --output imported/qwen3",
    )
    add = parser.add_argument
    add("source", metavar="FOLDER", help="a local folder")
    add("--output", required=True, metavar="DIR", help="a new folder")
    add(
        "--context_length",
        type=at_least(1),
        metavar="N",
        help="default: the model's max_position_embeddings",
    )
    add_shard_size(parser)
    return parser


def main(argv: list[str]) -> None:
    """Import the model, and print the notes and the names of the files."""
    options = parser().parse_args(argv)

    with collector_paused():  # torch takes seconds, for which --help does not wait
        from anlit.hub.import_model import import_model

    notes = import_model(
        options.source, options.output, options.context_length, options.max_shard_size
    )
    for note in notes:
        echo(note)
    file_names = sorted(path.name for path in Path(options.output).iterdir())
    echo(f"{options.output}: {', '.join(file_names)}")
