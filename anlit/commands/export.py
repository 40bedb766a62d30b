"""`anlit export`: a checkpoint's model in its own folder, for anlit or for transformers."""

from anlit.checkpoints.location import find_checkpoint
from anlit.commands.garbage_collection import collector_paused
from anlit.commands.shard_size import add_shard_size
from anlit.config.options import ToolParser
from anlit.reporting.text import echo


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit export",
        description="Writes a trained model into its own folder. As safetensors: "
        "model.safetensors, config.json and, if it is known, tokenizer.json; generate, score, "
        "lengths, needle, diagnose and fit's --initial_weights take that folder. As huggingface: "
        "a folder for transformers' AutoModelForCausalLM.from_pretrained.",
        epilog="Example: anlit export runs/angpt-seed1 --output exported/angpt",
    )
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder, .ckpt file, sharded checkpoint or exported folder",
    )
    add("--output", required=True, metavar="DIR", help="a new folder")
    add(
        "--format",
        choices=("safetensors", "huggingface"),
        default="safetensors",
        help="safetensors for anlit, huggingface for transformers (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="the precision of the weights in the file (default: float32)",
    )
    add_shard_size(parser)
    add("--tokenizer", metavar="FILE", help="the model's tokenizer.json (default: its data's)")
    return parser


def main(argv: list[str]) -> None:
    options = parser().parse_args(argv)
    find_checkpoint(options.checkpoint)

    with collector_paused():  # after the check: torch takes seconds
        from anlit.hub.export import export_model

    folder = export_model(
        options.checkpoint,
        options.output,
        options.format,
        options.tokenizer,
        options.dtype,
        options.max_shard_size,
    )
    file_names = sorted(path.name for path in folder.iterdir())
    echo(f"{folder}: {', '.join(file_names)}")
    if "tokenizer.json" not in file_names:
        cause = "without a tokenizer, which is not with the model's data any more"
        echo(f"{cause}: --tokenizer FILE adds it")
