"""`anlit export`: a checkpoint's model in a folder of its own, for anlit or for transformers."""

from anlit.checkpoints.location import require_path
from anlit.inference.export import FORMATS, export_model
from anlit.options import CommandParser
from anlit.reporting.text import echo


def main(argv: list[str]) -> int:
    """`anlit export`; returns the exit status and raises UserError for the user's mistakes."""
    parser = CommandParser(
        prog="anlit export",
        description="Writes a trained model into a folder of its own. As safetensors: model.safetensors, config.json "
        "and, where it is known, tokenizer.json; every command of anlit takes that folder, and --initial_weights "
        "unless it is folded. As huggingface: what transformers' AutoModelForCausalLM.from_pretrained takes.",
        epilog="Example: anlit export runs/angpt-seed1 --fold --output exported/angpt",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="run folder, .ckpt file, sharded checkpoint or exported folder")
    add("--output", required=True, metavar="DIR", help="a new folder")
    add(
        "--format", choices=FORMATS, default="safetensors", help="for anlit, or for transformers (default: safetensors)"
    )
    add("--fold", action="store_true", help="store the factors of nGPT and anGPT in their matrices: only for inference")
    add("--tokenizer", metavar="FILE", help="the model's tokenizer.json (default: that of its data)")
    arguments = parser.parse_args(argv)
    require_path(arguments.checkpoint)
    folder = export_model(arguments.checkpoint, arguments.output, arguments.format, arguments.fold, arguments.tokenizer)
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    echo(f"{folder}: {names}")
    if not (folder / "tokenizer.json").is_file():
        echo("without a tokenizer, which is not with the model's data any more: --tokenizer FILE adds it")
    return 0
