"""`anlit lengths | needle | diagnose`: evaluations of trained models."""

import argparse
import shlex
from dataclasses import fields
from typing import Any

from anlit.checkpoints.location import find_checkpoint
from anlit.commands.garbage_collection import collector_paused
from anlit.config.options import ToolParser, at_least, numbers
from anlit.errors import UserError
from anlit.evaluation.settings import (
    MAX_DEFAULT_TOKENS,
    NORMAL_LENGTHS,
    DiagnoseSettings,
    LengthsSettings,
    NeedleSettings,
)
from anlit.io.write import folder_to_fill

DESCRIPTIONS = {
    "lengths": "The validation loss of trained models on sequences of several lengths, always of "
    "the same tokens, with and without document masking, and by position. Runs that differ only in "
    "their seed are averaged.",
    "needle": "Needle in a haystack: hides 'The special magic <city> number is <7 digits>.' in "
    "text of the validation split, asks for the number at its end, and counts how often the model "
    "gives it exactly. Runs that differ only in their seed are averaged. Fine-tune the models on "
    "the task first, with experiment/needle.yaml.",
    "diagnose": "Attention statistics per layer and head over the context length: entropy, "
    "1/w_max, Σw², the weight on ranges of distances, on the last 100 tokens and on the first "
    "(the sink), and how large the average of the values is. Also the norms of the vectors by "
    "layer and the distribution of the scores, trained and untrained. With --gaussian the weights "
    "for independent normal scores, which needs no model.",
}
"""Command → the description in its help."""
EPILOGS = {
    "lengths": "Writes lengths.html, lengths.md, lengths.json and the picture. Example: "
    "anlit lengths runs/gpt runs/angpt --output reports/lengths",
    "needle": "Writes needle.html, needle.md, needle.json and the picture. Example: "
    "anlit needle runs/gpt-needle runs/angpt-needle --output reports/needle",
    "diagnose": "Writes report.html, report.md, diagnose.json and pictures. Examples: "
    "anlit diagnose runs/angpt --output reports/attention; "
    "anlit diagnose --gaussian --mechanisms Plain,SqrtLogN,ScaleInvariant "
    "--output reports/gaussian",
}
"""Command → the end of its help."""
SETTINGS = {"lengths": LengthsSettings, "needle": NeedleSettings, "diagnose": DiagnoseSettings}
"""Command → the class of its settings."""
DEFAULT_LENGTHS = {
    "lengths": "1, 4 and 16 times the training length",
    "needle": "1, 4 and 16 times the training length",
    "diagnose": "256,1024,4096; with --gaussian 10 … 100,000",
}
"""Command → the default of --lengths, in its help."""
DEFAULT_MECHANISMS = "Plain,LogN,SqrtLogN,ScaleInvariant"
"""Default of --mechanisms, with --gaussian."""
DEFAULT_DRAWS = 256
"""Default of --draws, with --gaussian."""
DEFAULT_GAUSSIAN_SEED = 1
"""Default of --seed, with --gaussian."""
MODEL_OPTIONS = ("data", "device", "tokens", "masking")
"""Options of `diagnose` that a model needs."""
GAUSSIAN_OPTIONS = ("mechanisms", "draws", "seed")
"""Options of `diagnose` that --gaussian needs."""


def parser(command: str) -> ToolParser:
    """Return the options of a command. None stands for the default in its settings."""
    parser = ToolParser(
        prog=f"anlit {command}", description=DESCRIPTIONS[command], epilog=EPILOGS[command]
    )
    add = parser.add_argument
    add(
        "checkpoints",
        nargs="*" if command == "diagnose" else "+",
        metavar="CHECKPOINT",
        help="run folder (its best checkpoint), .ckpt file or exported folder; or an earlier "
        f"{command}.json, to draw it again",
    )
    add("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    add("--data", metavar="PATH", help="prepared folder to read (default: the runs' own)")
    add(
        "--lengths",
        type=numbers,
        metavar="N,…",
        help=f"tokens in a sequence (default: {DEFAULT_LENGTHS[command]})",
    )
    add("--device", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    add_options = {
        "lengths": _add_lengths_options,
        "needle": _add_needle_options,
        "diagnose": _add_diagnose_options,
    }
    add_options[command](parser)
    return parser


def _add_lengths_options(parser: ToolParser) -> None:
    add = parser.add_argument
    add(
        "--tokens",
        type=at_least(1),
        metavar="N",
        help="validate on N tokens, spread over the split and rounded down to a multiple of every "
        f"length (default: all, ≤ {MAX_DEFAULT_TOKENS:,})",
    )
    add(
        "--batch_tokens",
        type=at_least(1),
        metavar="N",
        help="tokens per batch, which has at least one sequence "
        f"(default: {LengthsSettings.batch_tokens:,})",
    )
    add(
        "--masking",
        choices=("on", "off", "on,off"),
        metavar="MODES",
        help="document masking: on, off or both (default: on,off)",
    )


def _add_needle_options(parser: ToolParser) -> None:
    add = parser.add_argument
    add(
        "--depths",
        dest="n_depths",
        type=at_least(1),
        metavar="N",
        help="number of depths, evenly from 0 to 100 %% (default: 11)",
    )
    add(
        "--samples",
        dest="n_samples",
        type=at_least(1),
        metavar="N",
        help="at each depth and length (default: 20)",
    )
    add("--seed", type=at_least(0), help="seed of the samples (default: 0)")


def _add_diagnose_options(parser: ToolParser) -> None:
    add = parser.add_argument
    add(
        "--tokens",
        type=at_least(1),
        help=f"tokens read at each length (default: {DiagnoseSettings.tokens:,})",
    )
    add(
        "--masking",
        choices=("on", "off"),
        help="attend within documents only, or not (default: as in training)",
    )
    add("--gaussian", action="store_true", help="independent normal scores instead of a model's")
    add(
        "--mechanisms",
        metavar="NAME,…",
        help=f"with --gaussian: classes of anlit (default: {DEFAULT_MECHANISMS})",
    )
    add(
        "--draws",
        type=at_least(2),
        help=f"with --gaussian: queries per length (default: {DEFAULT_DRAWS})",
    )
    add(
        "--seed",
        type=at_least(0),
        help=f"with --gaussian: of the random numbers (default: {DEFAULT_GAUSSIAN_SEED})",
    )


def main(argv: list[str]) -> None:
    """Run the evaluation with whose name `argv` begins."""
    command, *arguments = argv
    options = parser(command).parse_args(arguments)
    if command == "diagnose":
        _check_diagnose_options(options)
    for checkpoint in options.checkpoints:
        find_checkpoint(checkpoint)

    with collector_paused():  # torch and matplotlib take seconds
        from anlit.evaluation.runner import evaluate

        evaluation = _evaluation(command, options)
    with folder_to_fill(options.output) as folder:
        evaluate(evaluation, options.checkpoints, folder, shlex.join(["anlit", *argv]))


def _evaluation(command: str, options: argparse.Namespace) -> Any:
    """Return the evaluation that the options describe."""
    from anlit.evaluation.diagnose import Diagnose
    from anlit.evaluation.gaussian import Gaussian
    from anlit.evaluation.lengths import Lengths
    from anlit.evaluation.needle import Needle

    if command == "diagnose" and options.gaussian:
        return Gaussian(
            (options.mechanisms or DEFAULT_MECHANISMS).split(","),
            options.lengths or NORMAL_LENGTHS,
            options.draws or DEFAULT_DRAWS,
            DEFAULT_GAUSSIAN_SEED if options.seed is None else options.seed,
        )
    evaluation_classes = {"lengths": Lengths, "needle": Needle, "diagnose": Diagnose}
    return evaluation_classes[command](_settings(command, options))


def _settings(command: str, options: argparse.Namespace) -> Any:
    """Return the command's settings, with their defaults for options that were not typed."""
    settings_class = SETTINGS[command]
    values = {}
    for field in fields(settings_class):
        value = getattr(options, field.name)
        if value is not None:
            values[field.name] = value
    if "masking" in values:
        masking = tuple(word == "on" for word in options.masking.split(","))
        values["masking"] = masking if command == "lengths" else masking[0]
    return settings_class(**values)


def _check_diagnose_options(options: argparse.Namespace) -> None:
    """Raise UserError for options of `diagnose` that do not go together."""
    if not options.gaussian and len(options.checkpoints) != 1:
        raise UserError("anlit diagnose takes one run folder or .ckpt file, or --gaussian")
    if options.gaussian and options.checkpoints:
        raise UserError("--gaussian takes no checkpoint: leave out one of them")
    unread_options = MODEL_OPTIONS if options.gaussian else GAUSSIAN_OPTIONS
    for name in unread_options:
        if getattr(options, name) is not None:
            condition = "with" if options.gaussian else "without"
            raise UserError(f"--{name} is not read {condition} --gaussian: leave it out")
    shortest = NORMAL_LENGTHS[0]
    if options.gaussian and options.lengths and max(options.lengths) < shortest:
        lengths = ",".join(map(str, options.lengths))
        cause = f"--lengths {lengths} with --gaussian is too short for a range of distances"
        raise UserError(f"{cause}: add one of {shortest} or more")
