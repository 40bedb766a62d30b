"""`anlit lengths`: a model's loss at the training length and beyond it, and by position."""

import shlex

from anlit.commands.checkpoints import add_checkpoint_options, add_length_options, parse_with_checkpoints
from anlit.evaluation.settings import BATCH_TOKENS, MOST_TOKENS, LengthsSettings, parse_lengths, parse_masking
from anlit.sentences import ToolParser


def parser() -> ToolParser:
    """The options of the command."""
    parser = ToolParser(
        prog="anlit lengths",
        description="The validation loss of trained models on sequences of several lengths, always of the same "
        "tokens, with and without document masking, and by position. Runs that differ only in their seed are averaged.",
        epilog="Writes lengths.html, lengths.md, lengths.json and the picture. Example: "
        "anlit lengths runs/gpt runs/angpt --output reports/lengths",
    )
    add = parser.add_argument
    add_checkpoint_options(parser, "lengths.json")
    add_length_options(parser, "sequence", "prepared folder")
    many = (
        "validate on N tokens, spread over the split and rounded down to a multiple of every length "
        f"(default: all, ≤ {MOST_TOKENS:,})"
    )
    add("--tokens", type=int, metavar="N", help=many)
    batch = f"tokens per batch, which has at least one sequence (default: {BATCH_TOKENS:,})"
    add("--batch_tokens", type=int, default=BATCH_TOKENS, metavar="N", help=batch)
    add("--masking", default="on,off", help="document masking: on, off or both (default: on,off)")
    return parser


def main(argv: list[str]) -> int:
    """`anlit lengths`; returns the exit status and raises UserError for the user's mistakes."""
    arguments = parse_with_checkpoints(parser(), argv)
    settings = LengthsSettings(
        lengths=parse_lengths(arguments.lengths) if arguments.lengths is not None else None,
        tokens=arguments.tokens,
        batch_tokens=arguments.batch_tokens,
        masking=parse_masking(arguments.masking),
        data=arguments.data,
        device=arguments.device,
    )

    from anlit.evaluation.lengths import Lengths  # torch and matplotlib take seconds
    from anlit.evaluation.runner import evaluate

    evaluate(Lengths(settings), arguments.checkpoints, arguments.output, shlex.join(["anlit", "lengths", *argv]))
    return 0
