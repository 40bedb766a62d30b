"""`anlit needle`: how often models find a number in a long text, by depth and length (arXiv 2505.17083)."""

import shlex

from anlit.commands.checkpoints import add_checkpoint_options, add_length_options, parse_with_checkpoints
from anlit.evaluation.settings import NeedleSettings, parse_lengths
from anlit.sentences import ToolParser


def parser() -> ToolParser:
    """The options of the command."""
    parser = ToolParser(
        prog="anlit needle",
        description="Needle in a haystack: hides 'The special magic <city> number is <7 digits>.' in text of the "
        "validation split, asks for the number at its end, and counts how often the model gives it exactly. Runs that "
        "differ only in their seed are averaged. Fine-tune the models on the task first, with "
        "experiment/needle.yaml.",
        epilog="Writes needle.html, needle.md, needle.json and the picture. Example: "
        "anlit needle runs/gpt-needle runs/angpt-needle --output reports/needle",
    )
    add = parser.add_argument
    add_checkpoint_options(parser, "needle.json")
    add_length_options(parser, "sample", "prepared folder of the haystacks")
    add("--depths", type=int, default=11, metavar="N", help="number of depths, evenly from 0 to 100 %% (default: 11)")
    add("--samples", type=int, default=20, metavar="N", help="samples at each depth and length (default: 20)")
    add("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    return parser


def main(argv: list[str]) -> int:
    """`anlit needle`; returns the exit status and raises UserError for the user's mistakes."""
    arguments = parse_with_checkpoints(parser(), argv)
    settings = NeedleSettings(
        lengths=parse_lengths(arguments.lengths) if arguments.lengths is not None else None,
        n_depths=arguments.depths,
        n_samples=arguments.samples,
        seed=arguments.seed,
        data=arguments.data,
        device=arguments.device,
    )

    from anlit.evaluation.needle import Needle  # torch and matplotlib take seconds
    from anlit.evaluation.runner import evaluate

    evaluate(Needle(settings), arguments.checkpoints, arguments.output, shlex.join(["anlit", "needle", *argv]))
    return 0
