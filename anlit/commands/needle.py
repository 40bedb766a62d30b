"""`anlit needle`: how often models find a number in a long text, by depth and length (arXiv 2505.17083)."""

import shlex
from typing import Any

from anlit.commands.support.checkpoints import add_checkpoint_options, add_length_options, parse_with_checkpoints
from anlit.evaluation.needle.settings import Settings
from anlit.evaluation.sequence_lengths import parse_lengths
from anlit.options import CommandParser


def needle(checkpoints: list[str], output: str, settings: Settings, command: str = "") -> dict[str, Any]:
    """Score every checkpoint, print the table and write the report; returns the content of needle.json."""
    # imported late, because torch and matplotlib take seconds
    from anlit.evaluation.needle import tables
    from anlit.evaluation.needle.checkpoints import score_all
    from anlit.evaluation.needle.plot import plot_heat_maps
    from anlit.reporting.files import output_folder, write_json, write_text, writing
    from anlit.reporting.table import console as terminal

    folder, console = output_folder(output), terminal()
    results, record = score_all(checkpoints, settings, command)
    tables.show(results, console)
    picture = folder / tables.PLOT
    with writing(folder):
        write_json(folder / "needle.json", record)
        write_text(folder / "needle.md", tables.markdown(results, record))
        plot_heat_maps(results, picture)
    console.print(f"Plot: {picture}", markup=False, highlight=False, soft_wrap=True)
    return record


def main(argv: list[str]) -> int:
    """`anlit needle`; returns the exit status and raises UserError for the user's mistakes."""
    parser = CommandParser(
        prog="anlit needle",
        description="Needle in a haystack: hides 'The special magic <city> number is <7 digits>.' in text of the "
        "validation split, asks for the number at its end, and counts how often the model gives it exactly. Runs that "
        "differ only in their seed are averaged. Fine-tune the models on the task first, with "
        "experiment/needle.yaml.",
        epilog="Writes needle.png, needle.md and needle.json. Example: "
        "anlit needle runs/gpt-needle runs/angpt-needle --output reports/needle",
    )
    add = parser.add_argument
    add_checkpoint_options(parser)
    add_length_options(parser, "sample", "prepared folder of the haystacks")
    add("--depths", type=int, default=11, metavar="N", help="number of depths, evenly from 0 to 100 %% (default: 11)")
    add("--samples", type=int, default=20, metavar="N", help="samples at each depth and length (default: 20)")
    add("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    arguments = parse_with_checkpoints(parser, argv)
    settings = Settings(
        lengths=parse_lengths(arguments.lengths) if arguments.lengths is not None else None,
        n_depths=arguments.depths,
        n_samples=arguments.samples,
        seed=arguments.seed,
        data=arguments.data,
        device=arguments.device,
    )
    needle(arguments.checkpoints, arguments.output, settings, shlex.join(["anlit", "needle", *argv]))
    return 0
