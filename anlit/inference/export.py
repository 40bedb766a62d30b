"""`anlit export`: a checkpoint's weights as one safetensors file, with what is needed to use them."""

import argparse
from pathlib import Path

from anlit.errors import UserError


def export(checkpoint: str, output: str) -> Path:
    """Write the model of `checkpoint` into the folder `output`, and return that.

    Args:
        checkpoint: A run folder (its best checkpoint, else its last), a .ckpt file, or a sharded checkpoint.
        output: Made where missing.

    Raises:
        UserError: No such checkpoint, a damaged or foreign one, or `output` holds something or cannot be written.
    """
    from anlit.evaluation.checkpoint import find_file, load_checkpoint
    from anlit.training.checkpoint_io import read_checkpoint
    from anlit.training.exported import write_exported

    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {output} is not an empty folder: choose a new name")
    loaded = load_checkpoint(checkpoint, "cpu")  # proves that the weights fit
    data = (loaded.trained_on or {}).get("path")
    tokenizer = Path(data) / "tokenizer.json" if data and "://" not in data else None
    try:
        write_exported(
            read_checkpoint(find_file(checkpoint)),
            loaded.settings,
            folder,
            tokenizer.read_bytes() if tokenizer is not None and tokenizer.is_file() else None,
        )
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): give a writable folder") from error
    return folder


def main(argv: list[str]) -> int:
    """`anlit export`; returns the exit status and raises UserError for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="anlit export",
        description="Writes a trained model into a folder of its own: model.safetensors, config.json and, where the "
        "data is still in its place, tokenizer.json. The evaluation commands and --initial_weights take that folder.",
        epilog="Example: anlit export runs/angpt-seed1 --output exported/angpt",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder, .ckpt file or sharded checkpoint")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder")
    arguments = parser.parse_args(argv)
    folder = export(arguments.checkpoint, arguments.output)
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {names}")
    return 0
