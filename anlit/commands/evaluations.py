"""`anlit lengths | needle | diagnose`: the options of the evaluations of trained models, and their start."""

import argparse
import shlex
from dataclasses import fields

from anlit.checkpoints.location import find_checkpoint
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
    "lengths": "The validation loss of trained models on sequences of several lengths, always of the same tokens, with "
    "and without document masking, and by position. Runs that differ only in their seed are averaged.",
    "needle": "Needle in a haystack: hides 'The special magic <city> number is <7 digits>.' in text of the validation "
    "split, asks for the number at its end, and counts how often the model gives it exactly. Runs that differ only in "
    "their seed are averaged. Fine-tune the models on the task first, with experiment/needle.yaml.",
    "diagnose": "Attention statistics per layer and head over the context length: entropy, 1/w_max, Σw², the weight on "
    "ranges of distances, on the last 100 tokens and on the first (the sink), and how large the average of the values "
    "is. With --gaussian the same for independent normal scores, which needs no model.",
}
EPILOGS = {
    "lengths": "Writes lengths.html, lengths.md, lengths.json and the picture. Example: "
    "anlit lengths runs/gpt runs/angpt --output reports/lengths",
    "needle": "Writes needle.html, needle.md, needle.json and the picture. Example: "
    "anlit needle runs/gpt-needle runs/angpt-needle --output reports/needle",
    "diagnose": "Writes report.html, report.md, diagnose.json and pictures. Examples: "
    "anlit diagnose runs/angpt --output reports/attention; "
    "anlit diagnose --gaussian --mechanisms Plain,SqrtLogN,ScaleInvariant --output reports/gaussian",
}
SETTINGS = {"lengths": LengthsSettings, "needle": NeedleSettings, "diagnose": DiagnoseSettings}
MECHANISMS = "Plain,LogN,SqrtLogN,ScaleInvariant"
LENGTHS = dict.fromkeys(("lengths", "needle"), "1, 4 and 16 times the training length")
LENGTHS["diagnose"] = "256,1024,4096; with --gaussian 10 … 100,000"


def parser(command: str) -> ToolParser:
    """The options of one of the commands; None stands for the default of its settings."""
    parser = ToolParser(
        prog=f"anlit {command}", description=DESCRIPTIONS[command], epilog=EPILOGS[command]
    )
    add = parser.add_argument
    kinds = "run folder (its best checkpoint), .ckpt file or exported folder; or an earlier "
    many = "*" if command == "diagnose" else "+"
    add(
        "checkpoints",
        nargs=many,
        metavar="CHECKPOINT",
        help=f"{kinds}{command}.json, to draw it again",
    )
    add("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    add("--data", metavar="PATH", help="prepared folder to read (default: the runs' own)")
    add(
        "--lengths",
        type=numbers,
        metavar="N,…",
        help=f"tokens in a sequence (default: {LENGTHS[command]})",
    )
    add("--device", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    if command == "lengths":
        most = f"(default: all, ≤ {MAX_DEFAULT_TOKENS:,})"
        tokens = f"validate on N tokens, spread over the split and rounded down to a multiple of every length {most}"
        add("--tokens", type=at_least(1), metavar="N", help=tokens)
        batch = f"tokens per batch, which has at least one sequence (default: {LengthsSettings.batch_tokens:,})"
        add("--batch_tokens", type=at_least(1), metavar="N", help=batch)
        add(
            "--masking",
            choices=("on", "off", "on,off"),
            help="document masking: on, off or both (default: on,off)",
        )
    elif command == "needle":
        add(
            "--depths",
            dest="n_depths",
            type=at_least(1),
            metavar="N",
            help="evenly from 0 to 100 %% (default: 11)",
        )
        add(
            "--samples",
            dest="n_samples",
            type=at_least(1),
            metavar="N",
            help="at each depth and length (default: 20)",
        )
        add("--seed", type=at_least(0), help="seed of the samples (default: 0)")
    else:
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
        add(
            "--gaussian", action="store_true", help="independent normal scores instead of a model's"
        )
        add(
            "--mechanisms",
            metavar="NAME,…",
            help=f"with --gaussian: classes of anlit (default: {MECHANISMS})",
        )
        add("--draws", type=at_least(2), help="with --gaussian: queries per length (default: 256)")
        add("--seed", type=at_least(0), help="with --gaussian: of the random numbers (default: 1)")
    return parser


def main(argv: list[str]) -> None:
    command, *words = argv
    given = parser(command).parse_args(words)
    if command == "diagnose":
        _check_diagnose(given)
    for checkpoint in given.checkpoints:
        find_checkpoint(checkpoint)

    from anlit.evaluation.diagnose import Diagnose  # torch and matplotlib take seconds
    from anlit.evaluation.gaussian import Gaussian
    from anlit.evaluation.lengths import Lengths
    from anlit.evaluation.needle import Needle
    from anlit.evaluation.runner import Evaluation, evaluate

    evaluation: Evaluation
    if command == "diagnose" and given.gaussian:
        lengths = given.lengths or NORMAL_LENGTHS
        seed = 1 if given.seed is None else given.seed
        evaluation = Gaussian(
            (given.mechanisms or MECHANISMS).split(","), lengths, given.draws or 256, seed
        )
    else:
        values = {field.name: getattr(given, field.name) for field in fields(SETTINGS[command])}
        if values.get("masking"):
            masking = tuple(part == "on" for part in given.masking.split(","))
            values["masking"] = masking if command == "lengths" else masking[0]
        settings = SETTINGS[command](
            **{name: value for name, value in values.items() if value is not None}
        )
        evaluation = {"lengths": Lengths, "needle": Needle, "diagnose": Diagnose}[command](settings)
    with folder_to_fill(given.output) as folder:
        evaluate(evaluation, given.checkpoints, folder, shlex.join(["anlit", *argv]))


def _check_diagnose(given: argparse.Namespace) -> None:
    if not given.gaussian and len(given.checkpoints) != 1:
        raise UserError("anlit diagnose takes one run folder or .ckpt file, or --gaussian")
    if given.gaussian and given.checkpoints:
        raise UserError("--gaussian takes no checkpoint: leave out one of them")
    others = (
        ("data", "device", "tokens", "masking")
        if given.gaussian
        else ("mechanisms", "draws", "seed")
    )
    if unread := next((name for name in others if getattr(given, name) is not None), None):
        raise UserError(
            f"--{unread} is not read {'with' if given.gaussian else 'without'} --gaussian: leave it out"
        )
    if given.gaussian and given.lengths and max(given.lengths) < NORMAL_LENGTHS[0]:
        lengths = ",".join(map(str, given.lengths))
        advice = f"add one of {NORMAL_LENGTHS[0]} or more"
        raise UserError(
            f"--lengths {lengths} with --gaussian is too short for a range of distances: {advice}"
        )
