"""`anlit diagnose`: how a trained model's attention spreads its weights, or that of independent normal scores."""

import argparse
import shlex

from anlit.checkpoints.location import require_path
from anlit.errors import UserError
from anlit.evaluation.settings import NORMAL_LENGTHS, NORMAL_SEEDS, DiagnoseSettings, parse_lengths
from anlit.sentences import ToolParser


def main(argv: list[str]) -> int:
    """`anlit diagnose`; returns the exit status and raises UserError for the user's mistakes."""
    arguments = parser().parse_args(argv)
    command = shlex.join(["anlit", "diagnose", *argv])
    if arguments.gaussian:
        if arguments.checkpoint is not None:
            raise UserError("--gaussian takes no checkpoint: leave out one of them")
        return _of_normal_scores(arguments, command)
    if arguments.checkpoint is None:
        raise UserError("anlit diagnose needs a run folder or a .ckpt file, or --gaussian")
    settings = DiagnoseSettings(
        lengths=parse_lengths(arguments.lengths) if arguments.lengths else None,
        tokens=arguments.tokens,
        masking=None if arguments.masking is None else arguments.masking == "on",
        data=arguments.data,
        device=arguments.device,
    )
    require_path(arguments.checkpoint)

    from anlit.evaluation.diagnose import Diagnose  # torch and matplotlib take seconds
    from anlit.evaluation.runner import evaluate

    evaluate(Diagnose(settings), [arguments.checkpoint], arguments.output, command)
    return 0


def _of_normal_scores(arguments: argparse.Namespace, command: str) -> int:
    lengths = list(parse_lengths(arguments.lengths) if arguments.lengths else NORMAL_LENGTHS)
    if max(lengths) < NORMAL_LENGTHS[0]:
        raise UserError(
            f"--lengths {arguments.lengths} with --gaussian is too short for a range of distances: add one of "
            f"{NORMAL_LENGTHS[0]} or more"
        )
    if arguments.draws < 2:
        raise UserError(f"--draws must be at least 2, not {arguments.draws}")
    if not 0 <= arguments.seed < NORMAL_SEEDS:
        raise UserError(f"--seed must be at least 0 and below 2^63, not {arguments.seed}")

    from anlit.evaluation.gaussian import Gaussian  # torch and matplotlib take seconds
    from anlit.evaluation.runner import evaluate

    evaluation = Gaussian(arguments.mechanisms.split(","), lengths, arguments.draws, arguments.seed)
    evaluate(evaluation, [], arguments.output, command)
    return 0


def parser() -> ToolParser:
    """The options of the command."""
    parser = ToolParser(
        prog="anlit diagnose",
        description="Attention statistics per layer and head over the context length: entropy, 1/w_max, Σw², the "
        "weight on ranges of distances, on the last 100 tokens and on the first (the sink), and how large the "
        "average of the values is. With --gaussian the same for independent normal scores, which needs no model.",
        epilog="Writes report.html, report.md, diagnose.json and pictures. Examples: "
        "anlit diagnose runs/angpt --output reports/attention; "
        "anlit diagnose --gaussian --mechanisms Plain,SqrtLogN,ScaleInvariant --output reports/gaussian",
    )
    kinds = "run folder, .ckpt file or exported folder; or an earlier diagnose.json, to draw it again"
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=kinds)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    parser.add_argument("--data", metavar="PATH", help="prepared folder to read instead of the run's")
    parser.add_argument(
        "--lengths", metavar="N,N…", help="sequence lengths (default: 256,1024,4096; with --gaussian 100 … 100,000)"
    )
    tokens = DiagnoseSettings.tokens
    parser.add_argument("--tokens", type=int, default=tokens, help=f"tokens read at each length (default: {tokens:,})")
    parser.add_argument(
        "--masking", choices=("on", "off"), help="attend within documents only, or not (default: as in training)"
    )
    parser.add_argument("--device", default="auto", help="torch device (default: the GPU if there is one)")
    parser.add_argument("--gaussian", action="store_true", help="independent normal scores instead of a model's")
    parser.add_argument(
        "--mechanisms",
        default="Plain,LogN,SqrtLogN,ScaleInvariant",
        metavar="NAME,NAME…",
        help="with --gaussian: classes of anlit (default: Plain,LogN,SqrtLogN,ScaleInvariant)",
    )
    parser.add_argument("--draws", type=int, default=256, help="with --gaussian: queries per length (default: 256)")
    parser.add_argument("--seed", type=int, default=1, help="with --gaussian: of the random numbers (default: 1)")
    return parser
