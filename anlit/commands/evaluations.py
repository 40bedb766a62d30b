"""`anlit lengths | needle | diagnose`: the options of the evaluations of trained models, and their start."""

import argparse
import shlex
from typing import Any

from anlit.checkpoints.location import require_path
from anlit.errors import UserError
from anlit.evaluation.settings import (
    BATCH_TOKENS,
    MOST_TOKENS,
    NORMAL_LENGTHS,
    NORMAL_SEEDS,
    DiagnoseSettings,
    LengthsSettings,
    NeedleSettings,
    parse_lengths,
    parse_masking,
)
from anlit.sentences import ToolParser, at_least

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


def parser(command: str) -> ToolParser:
    """The options of one of the commands."""
    parser = ToolParser(prog=f"anlit {command}", description=DESCRIPTIONS[command], epilog=EPILOGS[command])
    add = parser.add_argument
    kinds = "run folder (its best checkpoint), .ckpt file or exported folder; or an earlier "
    many = "?" if command == "diagnose" else "+"
    add("checkpoints", nargs=many, metavar="CHECKPOINT", help=f"{kinds}{command}.json, to draw it again")
    add("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    add("--data", metavar="PATH", help="prepared folder to read (default: the runs' own)")
    lengths = "1, 4 and 16 times the training length"
    if command == "diagnose":
        lengths = "256,1024,4096; with --gaussian 10 … 100,000"
    add("--lengths", metavar="N,…", help=f"tokens in a sequence (default: {lengths})")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default: auto)")
    {"lengths": _add_lengths, "needle": _add_needle, "diagnose": _add_diagnose}[command](add)
    return parser


def _add_lengths(add: Any) -> None:
    most = f"(default: all, ≤ {MOST_TOKENS:,})"
    tokens = f"validate on N tokens, spread over the split and rounded down to a multiple of every length {most}"
    add("--tokens", type=int, metavar="N", help=tokens)
    batch = f"tokens per batch, which has at least one sequence (default: {BATCH_TOKENS:,})"
    add("--batch_tokens", type=int, default=BATCH_TOKENS, metavar="N", help=batch)
    add("--masking", default="on,off", help="document masking: on, off or both (default: on,off)")


def _add_needle(add: Any) -> None:
    add("--depths", type=int, default=11, metavar="N", help="number of depths, evenly from 0 to 100 %% (default: 11)")
    add("--samples", type=int, default=20, metavar="N", help="samples at each depth and length (default: 20)")
    add("--seed", type=int, default=0, help="seed of the samples (default: 0)")


def _add_diagnose(add: Any) -> None:
    tokens = DiagnoseSettings.tokens
    add("--tokens", type=int, default=tokens, help=f"tokens read at each length (default: {tokens:,})")
    add("--masking", choices=("on", "off"), help="attend within documents only, or not (default: as in training)")
    add("--gaussian", action="store_true", help="independent normal scores instead of a model's")
    names = "Plain,LogN,SqrtLogN,ScaleInvariant"
    add("--mechanisms", default=names, metavar="NAME,…", help=f"with --gaussian: classes of anlit (default: {names})")
    add("--draws", type=at_least(2), default=256, help="with --gaussian: queries per length (default: 256)")
    add("--seed", type=int, default=1, help="with --gaussian: of the random numbers (default: 1)")


def main(argv: list[str]) -> None:
    """Run the command `argv[0]`; raises UserError for the user's mistakes."""
    command, *words = argv
    given = parser(command).parse_args(words)
    lengths = parse_lengths(given.lengths) if given.lengths is not None else None
    if command == "diagnose":
        given.checkpoints = [] if given.checkpoints is None else [given.checkpoints]
        settings: Any = _diagnose_settings(given, lengths)
    elif command == "lengths":
        masking = parse_masking(given.masking)
        settings = LengthsSettings(lengths, given.data, given.device, given.tokens, given.batch_tokens, masking)
    else:
        settings = NeedleSettings(lengths, given.data, given.device, given.depths, given.samples, given.seed)
    for checkpoint in given.checkpoints:
        require_path(checkpoint)

    from anlit.evaluation.diagnose import Diagnose  # torch and matplotlib take seconds
    from anlit.evaluation.gaussian import Gaussian
    from anlit.evaluation.lengths import Lengths
    from anlit.evaluation.needle import Needle
    from anlit.evaluation.runner import evaluate

    kinds: dict[str, Any] = {"lengths": Lengths, "needle": Needle, "diagnose": Diagnose}
    evaluation = Gaussian(*settings) if isinstance(settings, tuple) else kinds[command](settings)
    evaluate(evaluation, given.checkpoints, given.output, shlex.join(["anlit", *argv]))


def _diagnose_settings(given: argparse.Namespace, lengths: tuple[int, ...] | None) -> Any:
    """The settings of a model's statistics; a tuple of those of normal scores."""
    if not given.gaussian:
        if not given.checkpoints:
            raise UserError("anlit diagnose needs a run folder or a .ckpt file, or --gaussian")
        masking = None if given.masking is None else given.masking == "on"
        return DiagnoseSettings(lengths, given.data, given.device, given.tokens, masking)
    if given.checkpoints:
        raise UserError("--gaussian takes no checkpoint: leave out one of them")
    if lengths is not None and max(lengths) < NORMAL_LENGTHS[0]:
        raise UserError(
            f"--lengths {given.lengths} with --gaussian is too short for a range of distances: add one of "
            f"{NORMAL_LENGTHS[0]} or more"
        )
    if not 0 <= given.seed < NORMAL_SEEDS:
        raise UserError(f"--seed must be at least 0 and below 2^63, not {given.seed}")
    return given.mechanisms.split(","), lengths or NORMAL_LENGTHS, given.draws, given.seed
