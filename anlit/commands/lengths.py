"""`anlit lengths`: a model's loss at the training length and beyond it, and by position."""

import shlex
from typing import Any

from anlit.commands.support.checkpoints import add_checkpoint_options, add_length_options, parse_with_checkpoints
from anlit.evaluation.lengths.settings import BATCH_TOKENS, MOST_TOKENS, Settings, parse_masking
from anlit.evaluation.sequence_lengths import parse_lengths
from anlit.options import CommandParser


def lengths(checkpoints: list[str], output: str, settings: Settings, command: str = "") -> dict[str, Any]:
    """Measure every checkpoint, print the table and write the report; returns the content of lengths.json."""
    # imported late, because torch and matplotlib take seconds
    from anlit.evaluation.lengths import plot as lengths_plot
    from anlit.evaluation.lengths import tables
    from anlit.evaluation.lengths.checkpoints import measure_all
    from anlit.reporting.files import output_folder, write_json, write_text, writing
    from anlit.reporting.table import console as terminal

    folder, console = output_folder(output), terminal()
    results, record, notes = measure_all(checkpoints, settings, command)
    tables.show(results, console)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    picture = folder / tables.PLOT
    with writing(folder):
        write_json(folder / "lengths.json", record)
        write_text(folder / "lengths.md", tables.markdown(results, record, notes))
        lengths_plot.plot(results, sorted({one["training_length"] for one in record["checkpoints"]}), picture)
    console.print(f"Plot: {picture}", markup=False, highlight=False, soft_wrap=True)
    return record


def main(argv: list[str]) -> int:
    """`anlit lengths`; returns the exit status and raises UserError for the user's mistakes."""
    parser = CommandParser(
        prog="anlit lengths",
        description="The validation loss of trained models on sequences of several lengths, always of the same "
        "tokens, with and without document masking, and by position. Runs that differ only in their seed are averaged.",
        epilog="Writes lengths.png, lengths.md and lengths.json. Example: "
        "anlit lengths runs/gpt runs/angpt --output reports/lengths",
    )
    add = parser.add_argument
    add_checkpoint_options(parser)
    add_length_options(parser, "sequence", "prepared folder")
    many = (
        "validate on N tokens, spread over the split and rounded down to a multiple of every length "
        f"(default: all, ≤ {MOST_TOKENS:,})"
    )
    add("--tokens", type=int, metavar="N", help=many)
    batch = f"tokens per batch, which has at least one sequence (default: {BATCH_TOKENS:,})"
    add("--batch_tokens", type=int, default=BATCH_TOKENS, metavar="N", help=batch)
    add("--masking", default="on,off", help="document masking: on, off or both (default: on,off)")
    arguments = parse_with_checkpoints(parser, argv)
    settings = Settings(
        lengths=parse_lengths(arguments.lengths) if arguments.lengths is not None else None,
        tokens=arguments.tokens,
        batch_tokens=arguments.batch_tokens,
        masking=parse_masking(arguments.masking),
        data=arguments.data,
        device=arguments.device,
    )
    lengths(arguments.checkpoints, arguments.output, settings, shlex.join(["anlit", "lengths", *argv]))
    return 0
