"""`anlit lengths`: checkpoints measured on the same tokens, and the tables of their losses."""

import math
from collections.abc import Iterable
from typing import Any

from anlit.analysis.statistics import Summary, mean_sd
from anlit.checkpoints.loading import Checkpoint
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.arms import Candidate, group_by_seed
from anlit.evaluation.data import available_targets
from anlit.evaluation.lengths.measure import measure
from anlit.evaluation.lengths.plot import plot, seeds
from anlit.evaluation.runner import Evaluation, Report, Tell
from anlit.evaluation.settings import MOST_TOKENS, LengthsSettings, lengths_for
from anlit.reporting.page import listed
from anlit.reporting.table import NONE, Table, markdown_table
from anlit.reporting.text import literal

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
    """The loss at and beyond the training length, and by position.

    Args:
        settings: How to measure.
    """

    name = page = "lengths"
    settings: LengthsSettings

    def plan(self, candidates: list[Candidate]) -> dict[str, Any]:
        """The lengths and the number of tokens; raises UserError if the validation split is too short."""
        data = candidates[0].data
        self.lengths = lengths_for(self.settings.lengths, (own.description["training_length"] for own in candidates))
        self.available = available_targets(data)
        self.tokens = tokens_for(self.settings.tokens, self.lengths, self.available, f"{data.path}/val")
        return {"lengths": self.lengths, "tokens": self.tokens}

    def measure(self, checkpoint: Checkpoint, data: TokenShards, tell: Tell) -> list[dict[str, Any]]:
        masking = list(self.settings.masking)

        def say(own: dict[str, Any]) -> None:
            masked = "masked" if own["masking"] else "not masked"
            line = f"{own['total']['loss']:.4f} at {own['length']:,}, documents {masked}"
            tell(1 / len(self.lengths) / len(masking), line)

        return measure(checkpoint, data, self.lengths, masking, self.tokens, self.settings.batch_tokens, say)

    def record(self, candidates: list[Candidate], measurements: list[Any]) -> dict[str, Any]:
        record: dict[str, Any] = {"arms": group_by_seed(candidates), "measurements": measurements}
        for arm in record["arms"]:
            arm["loss"] = []
            for masked in self.settings.masking:
                for length in self.lengths:
                    loss = Summary(tuple(own["total"]["loss"] for own in seeds(record, arm, length, masked)))
                    arm["loss"].append({"length": length, "masking": masked, "mean": loss.mean, "sd": loss.sd})
        return record | {"notes": self._notes(candidates)}

    def _notes(self, candidates: list[Candidate]) -> list[str]:
        notes, asked = [], self.settings.tokens
        if asked is not None and self.tokens != asked:
            notes.append(
                f"Evaluated on {self.tokens:,} tokens and not {asked:,}: the number must be a multiple of every "
                f"length, and the validation split has {self.available:,}."
            )
        trained = {candidate.masked for candidate in candidates}
        if trained != set(self.settings.masking):
            modes = " and ".join("with" if masked else "without" for masked in sorted(trained, reverse=True))
            notes.append(f"The models were trained {modes} document masking.")
        return notes

    def report(self, record: dict[str, Any]) -> Report:
        lengths, masking, tokens = (record["settings"][name] for name in ("lengths", "masking", "tokens"))
        notes = record.get("notes", [])
        lines = [(arm, masked) for arm in record["arms"] for masked in masking]
        printed = [
            [arm["label"], _yes(masked), *(_loss_of(seeds(record, arm, length, masked)) for length in lengths)]
            for arm, masked in lines
        ]
        rows = [_row(arm, masked, length, seeds(record, arm, length, masked))
                for arm, masked in lines for length in lengths]  # fmt: skip
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
        told = [f"note: {note}" for note in notes]
        return Report(Table(title, head, printed), parts, {"lengths.png": lambda: plot(record)}, told)


def tokens_for(asked: int | None, lengths: list[int], available: int, where: str) -> int:
    """The number of targets to measure on: a multiple of every length.

    Args:
        asked: The number that the user gave, None for the default.
        lengths: The lengths to measure, ascending.
        available: Targets in the validation split.
        where: The split's folder.

    Raises:
        UserError: There are too few for the longest length, or for the least common multiple of the lengths.
    """
    block, listed = math.lcm(*lengths), ",".join(map(str, lengths))
    most = asked if asked is not None else max(MOST_TOKENS, block)
    if available < block:
        reason = "" if block == lengths[-1] else f", the least common multiple of {listed}"
        raise UserError(
            f"{where} has {available:,} tokens to predict and this needs {block:,}{reason}: set --lengths to "
            "shorter ones, or --data to a folder with a longer validation split"
        )
    if most < block:
        raise UserError(f"--tokens is {most:,} and --lengths {listed} need {block:,} at least: raise it")
    return min(most, available) // block * block


def _row(arm: dict[str, Any], masked: bool, length: int, own: list[dict[str, Any]]) -> list[str]:
    """A row of the main table, in the columns of HEAD."""
    totals, changes = [seed["total"] for seed in own], [seed["change"] for seed in own]
    return [
        literal(arm["label"]), _yes(masked), f"{length:,}", str(len(own)), _mean(map(_loss, totals)), _error(totals),
        _mean(map(_loss, changes)), _error(changes), _mean(seed["bits_per_byte"] for seed in own),
        f"{totals[0]['tokens']:,}", f"{own[0]['sequences']:,}",
    ]  # fmt: skip


def _range_table(record: dict[str, Any], length: int, masked: bool) -> str:
    columns = [seeds(record, arm, length, masked) for arm in record["arms"]]
    rows = []
    for k, part in enumerate(columns[0][0]["by_position"]):
        cells = []
        for own in columns:
            estimates = [seed["by_position"][k]["estimate"] for seed in own]
            error = _error(estimates)
            cells.append(_mean(map(_loss, estimates)) + (f" (s.e. {error})" if error != NONE else ""))
        rows.append([f"{part['first']:,} – {part['end'] - 1:,}", f"{part['estimate']['tokens']:,}", *cells])
    return markdown_table(["positions", "tokens", *(literal(arm["label"]) for arm in record["arms"])], rows)


def _loss(estimate: dict[str, Any] | None) -> float | None:
    """The loss; NaN if it was not finite, which JSON has as null; None if nothing was measured."""
    if estimate is None or not estimate["tokens"]:
        return None
    return math.nan if estimate["loss"] is None else float(estimate["loss"])


def _loss_of(own: list[dict[str, Any]]) -> str:
    return _mean(_loss(seed["total"]) for seed in own)


def _mean(values: Iterable[float | None]) -> str:
    return mean_sd(Summary(tuple(values)), 4)


def _error(estimates: list[dict[str, Any] | None]) -> str:
    """The mean of the seeds' standard errors."""
    return _mean([Summary(tuple(own["standard_error"] if own else None for own in estimates)).mean])


def _yes(masked: bool) -> str:
    return "yes" if masked else "no"
