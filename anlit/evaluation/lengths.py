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
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from anlit.analysis.statistics import Summary, mean_sd
from anlit.checkpoints.loading import Checkpoint
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import available_targets, spread
from anlit.evaluation.runner import Evaluation, Report, group_by_seed
from anlit.evaluation.settings import MOST_TOKENS, LengthsSettings
from anlit.models.runtime import enough_memory
from anlit.reporting.figure import SHADED, TEXT, legend_below, line_styles, shade
from anlit.reporting.page import listed
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.text import literal, say
from anlit.targets import IGNORED

Floats = NDArray[np.float64]
LOGITS_AT_ONCE = 1 << 26  # numbers; 256 MiB in float32
FIRST_SHOWN = 8
"""The positions before have so little context that, beside their losses, other differences would not be visible."""
MOST_TICKS = 5
APART = 0.05
"""Distance of the lines' points on the logarithmic axis, so that their error bars can be told apart."""
HEAD = (
    "configuration", "documents masked", "length", "seeds", "loss", "standard error", "change", "its standard error",
    "bits per byte", "tokens", "sequences",
)  # fmt: skip
DEFINITION = """\
Loss is the mean in nats per token over the same {tokens:,} validation tokens at every length; only the cuts into
sequences differ. With more than one seed a value is the mean ± the standard deviation over seeds. *Standard
error* is that of one run's mean over its sequences (the mean of the runs' errors if there are several). *Change* is the
loss minus that at the training length. Both are on the same tokens, so its standard error, over blocks of {block:,}
tokens, is smaller than that of the losses."""
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
        """The lengths and the number of targets, a multiple of every length.

        Raises:
            UserError: There are too few targets for the longest length, or for the lengths' least common multiple.
        """
        self.lengths = self.settings.lengths_for(each.training_length for each in checkpoints)
        self.available, asked = available_targets(data), self.settings.tokens
        block, names = math.lcm(*self.lengths), ",".join(map(str, self.lengths))
        if self.available < block:
            reason = "" if block == self.lengths[-1] else f", the least common multiple of {names}"
            raise UserError(
                f"{data.path}/val has {self.available:,} tokens to predict and this needs {block:,}{reason}: set "
                "--lengths to shorter ones, or --data to a folder with a longer validation split"
            )
        if asked is not None and asked < block:
            raise UserError(f"--tokens is {asked:,} and --lengths {names} need {block:,} at least: raise it")
        self.tokens = min(asked or max(MOST_TOKENS, block), self.available) // block * block
        return {"lengths": self.lengths, "tokens": self.tokens}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> list[dict[str, Any]]:
        """The loss at every length, with and without document masking, on the same pieces of text: as long as the least
        common multiple of the lengths, evenly spread over the split.

        Returns:
            For each masking and length: {length, masking, total, change, by_position, sequences, bits_per_byte}.
            `change` is the loss minus that at the training length, with the standard error over pieces; None where it
            was not measured. `by_position` has {first, end, estimate} for the positions [first, end). All three are as
            `estimate` gives them.

        Raises:
            UserError: A batch does not fit into memory.
        """
        trained_length, piece, n_batch = checkpoint.training_length, math.lcm(*self.lengths), self.settings.batch_tokens
        spread(data, piece, self.tokens, n_batch)
        bytes_per_token = data.bytes_per_token()
        measurements: list[dict[str, Any]] = []
        for masked in self.settings.masking:
            checkpoint.model.model.document_masking = masked
            pieces: dict[int, list[Floats]] = {}
            # The training length comes first, because the others are compared with it.
            for length in sorted(self.lengths, key=lambda n: (n != trained_length, n)):
                losses, counts = sums_by_range(checkpoint, _batches(data, length, n_batch), length, masked)
                # Sums over a piece do not depend on the length of its sequences.
                pieces[length] = [each.sum(1).reshape(-1, piece // length).sum(1) for each in (losses, counts)]
                trained = pieces.get(trained_length) if length != trained_length else None
                total = estimate(losses.sum(1), counts.sum(1))
                bounds = [(0, 1), *((2 ** (k - 1), min(2**k, length)) for k in range(1, losses.shape[1]))]
                has_bits = bytes_per_token and total["tokens"]
                measurements.append({
                    "length": length,
                    "masking": masked,
                    "change": estimate(pieces[length][0] - trained[0], trained[1]) if trained else None,
                    "total": total,
                    "by_position": [
                        {"first": first, "end": end, "estimate": estimate(losses[:, k], counts[:, k])}
                        for k, (first, end) in enumerate(bounds)
                    ],
                    "sequences": int((counts.sum(1) > 0).sum()),
                    "bits_per_byte": total["loss"] / math.log(2) / bytes_per_token if has_bits else None,
                })  # fmt: skip
                documents = "masked" if masked else "not masked"
                say(f"{checkpoint.file}: {total['loss']:.4f} at {length:,}, documents {documents}")
        return sorted(measurements, key=lambda own: (not own["masking"], own["length"]))

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        record: dict[str, Any] = {"arms": group_by_seed(checkpoints), "measurements": measurements}
        for arm in record["arms"]:
            arm["loss"] = []
            for masked, length in product(self.settings.masking, self.lengths):
                loss = Summary(tuple(own["total"]["loss"] for own in seeds(record, arm, length, masked)))
                arm["loss"].append({"length": length, "masking": masked, "mean": loss.mean, "sd": loss.sd})
        notes, asked = [], self.settings.tokens
        if asked is not None and self.tokens != asked:
            notes.append(
                f"Evaluated on {self.tokens:,} tokens and not {asked:,}: the number must be a multiple of every "
                f"length, and the validation split has {self.available:,}."
            )
        trained = {checkpoint.model.model.document_masking for checkpoint in checkpoints}
        if trained != set(self.settings.masking):
            modes = " and ".join("with" if masked else "without" for masked in sorted(trained, reverse=True))
            notes.append(f"The models were trained {modes} document masking.")
        return record | {"notes": notes}

    def report(self, record: dict[str, Any]) -> Report:
        lengths, masking, tokens = (record["settings"][name] for name in ("lengths", "masking", "tokens"))
        rows, printed, notes = [], [], record.get("notes", [])
        for arm, masked in product(record["arms"], masking):
            label, yes = arm["label"], "yes" if masked else "no"
            cells = {f"{length:,}": _cells(seeds(record, arm, length, masked)) for length in lengths}
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
            where = "the document, documents masked" if masked else "the sequence, documents not masked"
            parts += [f"### Position in {where}", _range_table(record, lengths[-1], masked)]
        if notes:
            parts += ["## Notes", listed(notes)]
        title = f"Loss in nats per token, by length, on {tokens:,} tokens"
        head = ["configuration", "documents\nmasked", *(f"{length:,}" for length in lengths)]
        figures = {"lengths.png": lambda: plot(record)}
        return Report(Table(title, head, printed), parts, figures, [f"note: {note}" for note in notes])


def estimate(losses: Floats, tokens: Floats) -> dict[str, Any]:
    """Ratio of summed loss to counted targets, (sequences,) each, with the standard error over those that have targets.

    Returns:
        {loss, standard_error, tokens}: nats per counted token, None without tokens; its standard error over sequences,
        the units in which the corpus was sampled, None for fewer than two; the number of tokens.
    """
    losses, tokens = losses[tokens > 0], tokens[tokens > 0]
    n, total = len(tokens), float(tokens.sum())
    if n == 0:
        return {"loss": None, "standard_error": None, "tokens": 0}
    mean = float(losses.sum()) / total
    squares = float(np.square(losses - mean * tokens).sum())
    error = math.sqrt(n / (n - 1) * squares) / total if n > 1 else None
    return {"loss": mean, "standard_error": error, "tokens": int(total)}


def sums_by_range(checkpoint: Checkpoint, batches: Iterator[Batch], length: int, masked: bool) -> list[Floats]:
    """Summed losses and counted targets, (sequences, ranges) each.

    Raises:
        UserError: A batch does not fit into memory.
    """
    n_ranges = (length - 1).bit_length() + 1
    sums, advice = [], "set --batch_tokens to less, or --lengths to shorter ones"
    for batch in batches:
        with enough_memory(len(batch.tokens), length, checkpoint.device, advice):
            losses = token_losses(checkpoint.model, batch).cpu().double().numpy()
        counted = (batch.targets != IGNORED).numpy()
        positions = batch.positions.numpy() if masked else np.broadcast_to(np.arange(length), losses.shape)
        ranges = np.frexp(positions.astype(np.float64))[1]  # 0 for position 0, else ⌊log2 p⌋ + 1
        index = (np.arange(len(losses))[:, None] * n_ranges + ranges).ravel()
        sums.append([
            np.bincount(index, weights.ravel().astype(np.float64), len(losses) * n_ranges).reshape(-1, n_ranges)
            for weights in (np.where(counted, losses, 0.0), counted)
        ])  # fmt: skip
    return [np.concatenate(parts) for parts in zip(*sums, strict=True)]


@torch.inference_mode()
def token_losses(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy in nats of every target, (B, T), 0 if it does not count. Logits are computed in parts."""
    decoder, device = model.model, next(model.parameters()).device
    decoder.logits = lambda h: h  # those of many thousands of tokens, (B, T, V), would not fit into memory
    try:
        hidden = decoder(batch.tokens.to(device), batch.document_ids.to(device)).flatten(0, 1)
    finally:
        del decoder.logits
    targets = batch.targets.to(device).flatten()
    rows = max(1, LOGITS_AT_ONCE // model.vocab_size)
    losses = [
        cross_entropy(decoder.logits(h).float(), target, ignore_index=IGNORED, reduction="none")
        for h, target in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses).view(batch.targets.shape)


def _batches(data: TokenShards, length: int, batch_tokens: int) -> Iterator[Batch]:
    """The pieces, cut into sequences of `length`."""
    rows = max(1, batch_tokens // length)
    for pieces in data.val_dataloader():
        whole = pieces.split(length)
        by_row = (field.split(rows) for field in (whole.tokens, whole.targets, whole.document_ids, whole.positions))
        for parts in zip(*by_row, strict=True):
            yield whole._replace(**dict(zip(Batch._fields, parts, strict=False)))


def seeds(record: dict[str, Any], arm: dict[str, Any], length: int, masked: bool) -> list[dict[str, Any]]:
    """The measurement of each seed of an arm."""
    measurements = [own for member in arm["checkpoints"] for own in record["measurements"][member]]
    return [own for own in measurements if (own["length"], own["masking"]) == (length, masked)]


def _cells(own: list[dict[str, Any]]) -> list[str]:
    """The columns of HEAD after the length, from the measurement of each seed."""
    loss, change = ([seed[name] for seed in own] for name in ("total", "change"))
    bits = Summary(tuple(seed["bits_per_byte"] for seed in own))
    sizes = f"{loss[0]['tokens']:,}", f"{own[0]['sequences']:,}"
    return [str(len(own)), *_loss_and_error(loss), *_loss_and_error(change), mean_sd(bits, 4), *sizes]


def _range_table(record: dict[str, Any], length: int, masked: bool) -> str:
    columns = [seeds(record, arm, length, masked) for arm in record["arms"]]
    rows = []
    for k, part in enumerate(columns[0][0]["by_position"]):
        row = [f"{part['first']:,} – {part['end'] - 1:,}", f"{part['estimate']['tokens']:,}"]
        for own in columns:
            loss, error = _loss_and_error([seed["by_position"][k]["estimate"] for seed in own])
            row.append(loss if error == NONE else f"{loss} (s.e. {error})")
        rows.append(row)
    return markdown_table(["positions", "tokens", *(literal(arm["label"]) for arm in record["arms"])], rows)


def _loss_and_error(estimates: list[dict[str, Any] | None]) -> tuple[str, str]:
    """The loss over seeds, and the mean of their standard errors; JSON has null for a loss that is not finite."""
    losses, errors = [], []
    for own in estimates:
        known = own if own and own["tokens"] else None
        losses.append(None if known is None else math.nan if known["loss"] is None else known["loss"])
        errors.append(None if known is None else known["standard_error"])
    return mean_sd(Summary(tuple(losses)), 4), mean_sd(Summary((Summary(tuple(errors)).mean,)), 4)


def plot(record: dict[str, Any]) -> Figure:
    """A row of two panels for documents masked and not masked: by length, and by position.

    Points are means over seeds, bars ± one standard deviation. What is longer than the training length is shaded.
    """
    masking, lengths, arms = record["settings"]["masking"], record["settings"]["lengths"], record["arms"]
    size = (TEXT, 0.3 + 2.3 * len(masking) + 0.16 * len(arms))
    figure, grid = plt.subplots(len(masking), 2, figsize=size, sharex="col", sharey="col", squeeze=False)
    looks = line_styles([arm["label"] for arm in arms])
    handles = []
    for number, arm in enumerate(arms):
        look, n, shift = looks[arm["label"]], len(arm["checkpoints"]), APART * (number - (len(arms) - 1) / 2)
        style: Any = {"color": look.colour, "marker": look.marker, "linestyle": look.dash, "linewidth": 1.2}
        style["markersize"] = 3.5
        for axes, masked in zip(grid, masking, strict=True):
            by_length = [own for own in arm["loss"] if own["masking"] == masked]
            points = [(math.log2(own["length"]), own["mean"], own["sd"]) for own in by_length]
            for ax, line in zip(axes, (points, _by_position(seeds(record, arm, lengths[-1], masked))), strict=True):
                x, mean, sd = np.array(line, dtype=float).T
                ax.errorbar(x + shift, mean, sd, ecolor=(look.colour, 0.7), elinewidth=0.7, **style)
        handles.append(Line2D([], [], **style, label=f"{arm['label']} ({n} seed{'s' if n > 1 else ''})"))
    for axes, masked in zip(grid, masking, strict=True):
        for ax, what in zip(axes, ("by length", "by position"), strict=True):
            title = f"{what}, documents {'masked' if masked else 'not masked'}"
            ax.set(title=title, ylabel="loss (nats per token)")
            ax.grid()
    trained = math.log2(max(own["training_length"] for own in record["checkpoints"]))
    _label(grid[:, 0], "sequence length (tokens)", lengths, trained + APART * len(arms) / 2)
    low, high = grid[0, 1].get_xlim()
    powers = [1 << power for power in range(max(0, math.ceil(low)), math.floor(high) + 1)]
    _label(grid[:, 1], f"earlier tokens that the model sees (of {lengths[-1]:,})", powers, trained)
    if any(len(arm["checkpoints"]) > 1 for arm in arms):
        handles.append(Line2D([], [], color="0.4", marker="|", linestyle="", label="± standard deviation over seeds"))
    legend_below(figure, [*handles, SHADED])
    return figure


def _label(column: NDArray[Any], label: str, ticks: list[int], begin: float) -> None:
    """The title and some of the ticks of the axis that a column of panels shares; shaded from log₂ `begin` on."""
    shown = ticks[::-1][:: math.ceil(len(ticks) / MOST_TICKS)]
    column[-1].set(xlabel=label, xticks=np.log2(shown), xticklabels=[f"{tick:,}" for tick in shown])
    for ax in column:
        shade(ax, begin)


def _by_position(measurements: list[dict[str, Any]]) -> list[tuple[float, float | None, float | None]]:
    """(log₂ of the middle, mean, standard deviation) of the loss in ranges with tokens, from `FIRST_SHOWN` on."""
    ranges = list(zip(*(own["by_position"] for own in measurements), strict=True))
    full = [each for each in ranges if each[0]["estimate"]["tokens"]]
    points = []
    for each in [each for each in full if each[0]["first"] >= FIRST_SHOWN] or full:
        first, end = each[0]["first"], each[0]["end"]
        loss = Summary(tuple(part["estimate"]["loss"] for part in each))
        points.append(((math.log2(first) + math.log2(end)) / 2 if first else -0.5, loss.mean, loss.sd))
    return points
