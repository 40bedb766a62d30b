"""`anlit lengths`: the loss at and beyond the training length, always on the same tokens.

A position counts from 0 in its sequence or document, so the token after position p is predicted from p + 1 tokens.
Range 0 is position 0, range k ≥ 1 the positions [2^(k−1), 2^k).
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.compare.statistics import Summary, mean_sd
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import spread
from anlit.evaluation.runner import Evaluation, Report, group_by_seed
from anlit.evaluation.settings import MOST_TOKENS, LengthsSettings
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.models.runtime import allow_compiled_kernels, enough_memory
from anlit.reporting.figure import SHADED, TEXT, legend_below, line_styles, shade
from anlit.reporting.page import listed
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.text import literal, say
from anlit.training.load_model import Checkpoint

Floats = NDArray[np.float64]
LOGITS_AT_ONCE = 1 << 26  # numbers; 256 MiB in float32
FIRST_SHOWN = 8  # positions before have so little context that, beside their losses, nothing else would be visible
MOST_TICKS = 5
APART = 1.035  # ratio of neighbouring lines' x, so that their error bars can be told apart
HEAD = (
    "configuration", "documents masked", "length", "seeds", "loss", "standard error", "change", "its standard error",
    "bits per byte", "tokens", "sequences",
)  # fmt: skip
DEFINITION = """\
Loss is the mean in nats per token over the same {tokens:,} validation tokens at every length; only the cuts into
sequences differ. With more than one seed a value is the mean ± the standard deviation over seeds. *Standard
error* is that of one run's mean over its sequences (the mean of the runs' errors if there are several). *Change* is the
loss minus that at the training length. Both are on the same tokens, so its standard error, over blocks of {block:,}
tokens, is as a rule smaller than that of the losses."""
RANGES = """\
Mean loss by position in sequences of {length:,} tokens. At position p the model sees p tokens before the present one:
those of the document if documents are masked, else those of the sequence. The standard error (s.e.) is over sequences.
Different ranges have different tokens, and only long documents reach the late positions with masking. So compare along
a row, where all configurations read the same tokens."""


class Lengths(Evaluation):
    """The loss at and beyond the training length, and by position."""

    name = page = "lengths"
    settings: LengthsSettings

    def plan(self, checkpoints: list[Checkpoint], data: TokenShards) -> dict[str, Any]:
        """The lengths and the number of targets, a multiple of every length; UserError if there are too few for it."""
        plan, asked = super().plan(checkpoints, data), self.settings.tokens
        self.available, self.block = data.n_targets("val"), math.lcm(*self.lengths)
        needed = f"{self.block:,}, the least common multiple of --lengths {','.join(map(str, self.lengths))}"
        if self.available < self.block:
            raise UserError(
                f"{data.path}/val has {self.available:,} tokens to predict and this needs {needed}: set shorter ones, "
                "or --data to a folder with a longer validation split"
            )
        if asked is not None and asked < self.block:
            raise UserError(f"--tokens is {asked:,} and must be at least {needed}: raise it")
        self.tokens = (
            min(asked or max(MOST_TOKENS, self.block), self.available) // self.block * self.block
        )
        return plan | {"tokens": self.tokens}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> list[dict[str, Any]]:
        """The loss at every length, with and without document masking, on the same pieces of text: as long as the least
        common multiple of the lengths, evenly spread over the split. UserError if a batch does not fit into memory.

        Returns:
            For each masking and length: {length, masking, total, change, by_position, sequences, bits_per_byte}.
            `change` is the loss minus that at the training length, with the standard error over pieces; None where it
            was not measured. `by_position` has {first, end, estimate} for the positions [first, end). All three are as
            `estimate` gives them.
        """
        trained_length, n_batch = checkpoint.training_length, self.settings.batch_tokens
        bytes_per_token = data.bytes_per_token()  # of the split that `spread` takes pieces of
        spread(data, self.block, self.tokens, n_batch)
        measurements: list[dict[str, Any]] = []
        for masked in sorted(self.settings.masking, reverse=True):
            checkpoint.model.model.document_masking = masked
            sums, pieces = dict[int, list[Floats]](), dict[int, list[Floats]]()
            for n in self.lengths:
                allow_compiled_kernels(checkpoint.model.model, self.tokens, n)
                rows = max(1, n_batch // n)  # sequences of n tokens in a batch
                batches = (
                    batch
                    for piece in data.val_dataloader()
                    for batch in piece.split(n).in_rows(rows)
                )
                losses, counts = sums[n] = sums_by_range(checkpoint, batches, n, masked)
                # Sums over a piece do not depend on the length of its sequences.
                pieces[n] = [
                    each.sum(1).reshape(-1, self.block // n).sum(1) for each in (losses, counts)
                ]
                place = f"at {n:,}, documents {'' if masked else 'not '}masked"
                say(f"{checkpoint.file}: {losses.sum() / counts.sum():.4f} {place}")
            trained = pieces.pop(trained_length, None)
            for n, (losses, counts) in sums.items():
                total = estimate(losses.sum(1), counts.sum(1))
                has_bits = bytes_per_token and total["tokens"]
                measurements.append({
                    "length": n,
                    "masking": masked,
                    "change": estimate(pieces[n][0] - trained[0], trained[1]) if trained and n in pieces else None,
                    "total": total,
                    "by_position": [
                        {"first": 1 << k >> 1, "end": min(1 << k, n), "estimate": estimate(losses[:, k], counts[:, k])}
                        for k in range(losses.shape[1])
                    ],
                    "sequences": int((counts.sum(1) > 0).sum()),
                    "bits_per_byte": total["loss"] / math.log(2) / bytes_per_token if has_bits else None,
                })  # fmt: skip
        return measurements

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        record: dict[str, Any] = {
            "arms": group_by_seed(checkpoints),
            "measurements": measurements,
            "notes": [],
        }
        for arm in record["arms"]:
            arm["loss"] = []
            for masked, length in product(self.settings.masking, self.lengths):
                loss = Summary(
                    tuple(own["total"]["loss"] for own in seeds(record, arm, length, masked))
                )
                arm["loss"].append(
                    {"length": length, "masking": masked, "mean": loss.mean, "sd": loss.sd}
                )
        if self.settings.tokens not in (None, self.tokens):
            record["notes"].append(
                f"Evaluated on {self.tokens:,} tokens and not {self.settings.tokens:,}: the number must be a multiple "
                f"of every length, and the validation split has {self.available:,}."
            )
        trained = {
            checkpoint.model.model.document_masking
            for checkpoint in checkpoints
            if checkpoint.is_trained_here
        }
        if trained and trained != set(self.settings.masking):
            modes = " and ".join(
                "with" if masked else "without" for masked in sorted(trained, reverse=True)
            )
            record["notes"].append(f"The models were trained {modes} document masking.")
        return record

    def report(self, record: dict[str, Any]) -> Report:
        lengths, masking, tokens = (
            record["settings"][name] for name in ("lengths", "masking", "tokens")
        )
        rows, printed, notes = [], [], record.get("notes", [])
        for arm, masked in product(record["arms"], masking):
            label, yes = arm["label"], "yes" if masked else "no"
            cells = {
                f"{length:,}": _cells(seeds(record, arm, length, masked)) for length in lengths
            }
            rows += [[literal(label), yes, length, *each] for length, each in cells.items()]
            printed.append([label, yes, *(loss for _, loss, *_ in cells.values())])
        parts = [
            "# Loss by length",
            "![loss over length and position](lengths.png)",
            markdown_table(HEAD, rows),
            DEFINITION.format(tokens=tokens, block=math.lcm(*lengths)),
            "## By position",
            RANGES.format(length=lengths[-1]),
        ]
        for masked in masking:
            where = (
                "the document, documents masked" if masked else "the sequence, documents not masked"
            )
            parts += [f"### Position in {where}", _range_table(record, lengths[-1], masked)]
        parts += ["## Notes", listed(notes)] if notes else []
        title = f"Loss in nats per token, by length, on {tokens:,} tokens"
        table = Table(
            title,
            ["configuration", "documents\nmasked", *(f"{length:,}" for length in lengths)],
            printed,
        )
        return Report(
            table, parts, {"lengths.png": lambda: plot(record)}, [f"note: {note}" for note in notes]
        )


def estimate(losses: Floats, tokens: Floats) -> dict[str, Any]:
    """Ratio of summed loss to counted targets, (sequences,) each, over the sequences that have targets.

    Returns {loss, standard_error, tokens}: nats per counted token, None without tokens; its standard error over
    sequences, the units in which the corpus was sampled, None for fewer than two; the number of tokens.
    """
    losses, tokens = losses[tokens > 0], tokens[tokens > 0]
    n, total = len(tokens), float(tokens.sum())
    if n == 0:
        return {"loss": None, "standard_error": None, "tokens": 0}
    mean = float(losses.sum()) / total
    squares = float(np.square(losses - mean * tokens).sum())
    error = math.sqrt(n / (n - 1) * squares) / total if n > 1 else None
    return {"loss": mean, "standard_error": error, "tokens": int(total)}


def sums_by_range(
    checkpoint: Checkpoint, batches: Iterator[Batch], length: int, masked: bool
) -> list[Floats]:
    """Summed losses and counted targets, (sequences, ranges) each; UserError if a batch does not fit into memory."""
    n_ranges = (length - 1).bit_length() + 1
    sums, advice = [], "set --batch_tokens to less, or --lengths to shorter ones"
    for batch in batches:
        with enough_memory(len(batch.tokens), length, checkpoint.device, advice):
            losses = token_losses(checkpoint.model, batch).cpu().double().numpy()
        positions = (
            batch.positions.numpy() if masked else np.broadcast_to(np.arange(length), losses.shape)
        )
        ranges = np.frexp(positions.astype(np.float64))[1]  # 0 for position 0, else ⌊log2 p⌋ + 1
        index = (np.arange(len(losses))[:, None] * n_ranges + ranges).ravel()
        counted = (batch.targets != IGNORE_INDEX).numpy().ravel().astype(np.float64)
        sums.append([
            np.bincount(index, weights, len(losses) * n_ranges).reshape(-1, n_ranges)
            for weights in (losses.ravel(), counted)
        ])  # fmt: skip
    return [np.concatenate(parts) for parts in zip(*sums, strict=True)]


@torch.inference_mode()
def token_losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy in nats of every target, (B, T), 0 if it does not count. Logits are computed in parts."""
    decoder, device = model.model, next(model.parameters()).device
    decoder.logits = lambda h: (
        h
    )  # those of many thousands of tokens, (B, T, V), would not fit into memory
    try:
        hidden = decoder(batch.tokens.to(device), batch.document_ids.to(device)).flatten(0, 1)
    finally:
        del decoder.logits
    targets, rows = batch.targets.to(device).flatten(), max(1, LOGITS_AT_ONCE // model.vocab_size)
    losses = [
        cross_entropy(
            decoder.logits(h).float(), target, ignore_index=IGNORE_INDEX, reduction="none"
        )
        for h, target in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses).view(batch.targets.shape)


def seeds(
    record: dict[str, Any], arm: dict[str, Any], length: int, masked: bool
) -> list[dict[str, Any]]:
    """The measurement of each seed of an arm."""
    measurements = [own for member in arm["checkpoints"] for own in record["measurements"][member]]
    return [own for own in measurements if (own["length"], own["masking"]) == (length, masked)]


def _cells(own: list[dict[str, Any]]) -> list[str]:
    """The columns of HEAD after the length, from the measurement of each seed."""
    loss, change = ([seed[name] for seed in own] for name in ("total", "change"))
    bits = Summary(tuple(seed["bits_per_byte"] for seed in own))
    sizes = f"{loss[0]['tokens']:,}", f"{own[0]['sequences']:,}"
    return [
        str(len(own)),
        *_loss_and_error(loss),
        *_loss_and_error(change),
        mean_sd(bits, 4),
        *sizes,
    ]


def _range_table(record: dict[str, Any], length: int, masked: bool) -> str:
    columns, rows = [seeds(record, arm, length, masked) for arm in record["arms"]], []
    for k, part in enumerate(columns[0][0]["by_position"]):
        row = [f"{part['first']:,} – {part['end'] - 1:,}", f"{part['estimate']['tokens']:,}"]
        for own in columns:
            loss, error = _loss_and_error([seed["by_position"][k]["estimate"] for seed in own])
            row.append(loss if error == NONE else f"{loss} (s.e. {error})")
        rows.append(row)
    return markdown_table(
        ["positions", "tokens", *(literal(arm["label"]) for arm in record["arms"])], rows
    )


def _loss_and_error(estimates: list[dict[str, Any] | None]) -> tuple[str, str]:
    """The loss over seeds, and the mean of their standard errors; JSON has null for a loss that is not finite."""
    known = [
        own if own and own["tokens"] else {"loss": None, "standard_error": None}
        for own in estimates
    ]
    losses = [math.nan if own["loss"] is None and "tokens" in own else own["loss"] for own in known]
    error = Summary([own["standard_error"] for own in known]).mean
    return mean_sd(Summary(losses), 4), mean_sd(Summary([error]), 4)


def plot(record: dict[str, Any]) -> Figure:
    """A row of two panels for documents masked and not masked: by length, and by position.

    Points are means over seeds, bars ± one standard deviation. What is longer than the training length is shaded.
    """
    masking, lengths, arms = (
        record["settings"]["masking"],
        record["settings"]["lengths"],
        record["arms"],
    )
    size = (TEXT, 0.3 + 2.3 * len(masking) + 0.16 * len(arms))
    figure, grid = plt.subplots(
        len(masking), 2, figsize=size, sharex="col", sharey="col", squeeze=False
    )
    styles, handles = line_styles([arm["label"] for arm in arms]), []
    for number, arm in enumerate(arms):
        look, n, shift = (
            styles[arm["label"]],
            len(arm["checkpoints"]),
            APART ** (number - (len(arms) - 1) / 2),
        )
        style: Any = {"color": look.colour, "marker": look.marker, "linestyle": look.dash}
        for axes, masked in zip(grid, masking, strict=True):
            by_length = [
                (own["length"], own["mean"], own["sd"])
                for own in arm["loss"]
                if own["masking"] == masked
            ]
            by_position = _by_position(seeds(record, arm, lengths[-1], masked))
            for ax, points in zip(axes, (by_length, by_position), strict=True):
                x, mean, sd = np.array(points, dtype=float).T
                ax.errorbar(x * shift, mean, sd, ecolor=(look.colour, 0.7), elinewidth=0.7, **style)
        handles.append(
            Line2D([], [], **style, label=f"{arm['label']} ({n} seed{'s' if n > 1 else ''})")
        )
    trained = max(own["training_length"] for own in record["checkpoints"])
    for ax, (masked, what) in zip(
        grid.flat, product(masking, ("by length", "by position")), strict=True
    ):
        ax.set_xscale("log", base=2)
        ax.set(
            title=f"{what}, documents {'' if masked else 'not '}masked",
            ylabel="loss (nats per token)",
        )
        ax.grid()
        shade(ax, trained * APART ** (len(arms) / 2))
    shown = lengths[::-1][:: math.ceil(len(lengths) / MOST_TICKS)]
    grid[-1, 0].set(
        xlabel="sequence length (tokens)", xticks=shown, xticklabels=[f"{tick:,}" for tick in shown]
    )
    grid[-1, 1].set_xlabel(f"earlier tokens that the model sees (of {lengths[-1]:,})")
    grid[-1, 1].xaxis.set_major_locator(LogLocator(2, numticks=MOST_TICKS + 1))
    grid[-1, 1].xaxis.set_major_formatter("{x:,.0f}")
    if any(len(arm["checkpoints"]) > 1 for arm in arms):
        handles.append(
            Line2D(
                [],
                [],
                color="0.4",
                marker="|",
                linestyle="",
                label="± standard deviation over seeds",
            )
        )
    legend_below(figure, [*handles, SHADED])
    return figure


def _by_position(
    measurements: list[dict[str, Any]],
) -> list[tuple[float, float | None, float | None]]:
    """(Middle, mean, standard deviation) of the loss in ranges with tokens, from `FIRST_SHOWN` on."""
    ranges = list(zip(*(own["by_position"] for own in measurements), strict=True))
    full = [each for each in ranges if each[0]["estimate"]["tokens"]]
    points = []
    for each in [each for each in full if each[0]["first"] >= FIRST_SHOWN] or full:
        loss = Summary([part["estimate"]["loss"] for part in each])
        points.append((math.sqrt(max(0.5, each[0]["first"]) * each[0]["end"]), loss.mean, loss.sd))
    return points
