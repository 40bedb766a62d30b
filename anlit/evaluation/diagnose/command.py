"""`anlit diagnose`: how a trained model's attention spreads its weights, or that of independent normal scores."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from typing import Any

import torch

from anlit.attention.gaussian import expected_participation
from anlit.attention.mechanism import Mechanism
from anlit.attention.observation import attention_layers, bin_edges, observed
from anlit.attention.statistics import ranges
from anlit.checkpoints.loading import Checkpoint, load_checkpoint
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import available_targets, data_of, spread
from anlit.evaluation.options import parse_lengths
from anlit.evaluation.report import header
from anlit.layers.cross_entropy import IGNORED
from anlit.options import CommandParser
from anlit.reporting.files import output_folder

LENGTHS = (256, 1024, 4096)
TOKENS = 16_384
# Tokens in a batch: as many short sequences as keep the matrix products efficient.
BATCH_TOKENS = 4096


def diagnose(
    checkpoint: Checkpoint, data: TokenShards, lengths: list[int], tokens: int, masked: bool | None
) -> dict[str, Any]:
    """The attention statistics of each layer and head on validation text, by context length.

    Args:
        checkpoint: The model; its document masking is set to `masked`.
        data: Whose validation split is read, in sequences that are evenly spread over it.
        lengths: Tokens in a sequence, each measured by itself.
        tokens: How many are read at each length, rounded up to a whole sequence.
        masked: Whether tokens attend within their document only; None leaves it as the model was trained.

    Returns:
        `masking` and, by length in `lengths`: `length`, `tokens` read, `edges` of the bins of n, `queries` in each,
        `statistics` as {name: [layer][head][bin]}, `prediction` of Σ w² for normal scores as [layer][head][bin]. NaN
        where there was nothing to measure. `squared_average` is ‖Σ w v‖² over the mean ‖v‖².

    Raises:
        UserError: The validation split is shorter than a sequence.
    """
    model = checkpoint.model
    if masked is not None:
        model.model.document_masking = masked
    found = {length: _at_length(checkpoint, data, length, tokens) for length in lengths}
    return {"masking": model.model.document_masking, "lengths": found}


@torch.no_grad()
def _at_length(checkpoint: Checkpoint, data: TokenShards, length: int, tokens: int) -> dict[str, Any]:
    model, edges = checkpoint.model, bin_edges(length)
    read = 0
    with observed(model, edges, ranges(length - 1)) as layers:
        for batch in sequences(data, length, tokens):
            model(batch.tokens.to(checkpoint.device), batch.document_ids.to(checkpoint.device))
            read += batch.tokens.numel()
    if not read:
        raise UserError(
            f"{data.path}/val has no {length:,} tokens in a row: leave {length} out of --lengths, or set --data"
        )
    means = [layer.means() for layer in layers]
    return {
        "length": length,
        "tokens": read,
        "edges": edges,
        "queries": layers[0].counts()[0].long().tolist(),
        "statistics": {name: [layer[name].tolist() for layer in means] for name in means[0]},
        "prediction": [
            _predicted(layer.mechanism, mean["visible_keys"])
            for layer, mean in zip(attention_layers(model), means, strict=True)
        ],
    }


def sequences(data: TokenShards, length: int, tokens: int) -> Iterator[Batch]:
    """Whole sequences of `length` tokens, evenly spread over the validation split, for `tokens` at least if it has so
    many."""
    data.context_length = length
    if available_targets(data) < length:
        return
    spread(data, length, math.ceil(tokens / length) * length, BATCH_TOKENS)
    for batch in data.val_dataloader():
        whole = batch.targets[:, -1] != IGNORED
        if whole.any():
            yield batch._replace(tokens=batch.tokens[whole], document_ids=batch.document_ids[whole])


def _predicted(mechanism: Mechanism, n: torch.Tensor) -> list[list[float]]:
    """E Σ w² of normal scores at the mean numbers n of visible keys, (H, bins), which are the same for every head."""
    there = n[0].isfinite()
    values = torch.full_like(n, torch.nan)
    below = n[0, there].floor()
    P, next_P = (expected_participation(mechanism, counts).to(n).expand(len(n), -1) for counts in (below, below + 1))
    values[:, there] = torch.lerp(P, next_P, n[0, there] - below)
    return values.tolist()


def main(argv: list[str]) -> int:
    """`anlit diagnose`; returns the exit status and raises UserError for the user's mistakes."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    command = shlex.join(["anlit", "diagnose", *argv])
    if arguments.gaussian:
        if arguments.checkpoint is not None:
            raise UserError("--gaussian takes no checkpoint: leave out one of them")
        from anlit.evaluation.diagnose import gaussian

        return gaussian.run(arguments, command)
    if arguments.checkpoint is None:
        raise UserError("anlit diagnose needs a run folder or a .ckpt file, or --gaussian")
    lengths = list(parse_lengths(arguments.lengths)) if arguments.lengths else list(LENGTHS)
    if arguments.tokens < 1:
        raise UserError(f"--tokens must be at least 1, not {arguments.tokens}")
    folder = output_folder(arguments.output)
    checkpoint = load_checkpoint(arguments.checkpoint, arguments.device)
    data = data_of(checkpoint, arguments.data)
    record = header(command, [checkpoint], data)
    masked = None if arguments.masking is None else arguments.masking == "on"
    record |= diagnose(checkpoint, data, lengths, arguments.tokens, masked)
    from anlit.evaluation.diagnose import (
        report as diagnose_report,  # matplotlib takes a second: --help and errors do not wait for it
    )

    diagnose_report.publish(folder, checkpoint.label, record)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="anlit diagnose",
        description="Attention statistics per layer and head over the context length: entropy, 1/w_max, Σw², the "
        "weight on ranges of distances, on the last 100 tokens and on the first (the sink), and how large the "
        "average of the values is. With --gaussian the same for independent normal scores, which needs no model.",
        epilog="Writes diagnose.json, report.md and figures. Examples: "
        "anlit diagnose runs/angpt --output reports/attention; "
        "anlit diagnose --gaussian --mechanisms Plain,SqrtLogN,ScaleInvariant --output reports/gaussian",
    )
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="run folder or .ckpt file")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the report; made where missing")
    parser.add_argument("--data", metavar="PATH", help="prepared folder to read instead of the run's")
    parser.add_argument(
        "--lengths", metavar="N,N…", help="sequence lengths (default: 256,1024,4096; with --gaussian 100 … 100,000)"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens read at each length (default: {TOKENS:,})")
    parser.add_argument(
        "--masking", choices=("on", "off"), help="attend within documents only, or not (default: as in training)"
    )
    parser.add_argument("--device", default="auto", help="torch device (default: the GPU if there is one)")
    parser.add_argument("--gaussian", action="store_true", help="independent normal scores instead of a model's")
    parser.add_argument(
        "--mechanisms",
        metavar="NAME,NAME…",
        help="with --gaussian: classes, such as Plain, or YAML fragments, such as attention/log_n.yaml",
    )
    parser.add_argument("--draws", type=int, default=256, help="with --gaussian: queries per length (default: 256)")
    parser.add_argument("--seed", type=int, default=1, help="with --gaussian: of the random numbers (default: 1)")
    return parser
