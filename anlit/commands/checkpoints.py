"""The options that the commands for several checkpoints have in common; no torch."""

import argparse

from anlit.checkpoints.location import require_path
from anlit.sentences import ToolParser


def add_checkpoint_options(parser: ToolParser, record: str) -> None:
    """The checkpoints, the folder for the report and the device.

    Args:
        record: The JSON file that the command writes: `lengths.json`.
    """
    kinds = f"run folder (its best checkpoint), .ckpt file or exported folder; or an earlier {record}, to draw it again"
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=kinds)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")


def add_length_options(parser: ToolParser, of: str, data: str) -> None:
    """The prepared folder and the lengths.

    Args:
        of: What has a length: `sequence`, `sample`.
        data: What the folder is: `prepared folder`.
    """
    parser.add_argument("--data", metavar="PATH", help=f"{data} (default: the runs' own)")
    many = f"tokens per {of} (default: 1, 4 and 16 times the training length)"
    parser.add_argument("--lengths", metavar="N,…", help=many)


def parse_with_checkpoints(parser: ToolParser, argv: list[str]) -> argparse.Namespace:
    """The arguments, among them `checkpoints`, each of which is there.

    Raises:
        UserError: An option is wrong, or a checkpoint is missing.
    """
    arguments = parser.parse_args(argv)
    for checkpoint in arguments.checkpoints:
        require_path(checkpoint)
    return arguments
