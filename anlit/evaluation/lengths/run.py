"""Measures several checkpoints on the same tokens, with one model in memory at a time."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from anlit.checkpoints.loading import describe, device_name, find_device, find_file, load_checkpoint
from anlit.errors import UserError
from anlit.evaluation.arms import Arm, Origin, group_by_seed, mean_and_sd
from anlit.evaluation.data import available_targets, data_of
from anlit.evaluation.lengths.measure import Measurement, measure
from anlit.evaluation.lengths.report import Results
from anlit.evaluation.lengths.settings import Settings
from anlit.evaluation.record import header


class Candidate(NamedTuple):
    """A checkpoint that has passed all checks."""

    origin: Origin
    description: dict[str, Any]
    fingerprint: dict[str, Any]
    """Fingerprint of the data that it is evaluated on."""
    available: int
    """Targets in the validation split."""
    masked: bool
    """Whether it was trained with document masking."""


def run(paths: list[str], settings: Settings, command: str) -> tuple[Results, dict[str, Any], list[str]]:
    """The results, the record with all numbers, and notes for the reader.

    Raises:
        UserError: A checkpoint, the data or a setting is wrong. If possible it is raised before anything is measured.
    """
    record = header(command, [])
    device = find_device(settings.device)
    files = list({file.resolve(): file for file in map(find_file, paths)}.values())
    found = [_load_candidate(file, settings.data) for file in files]
    _refuse_different_data(found)
    lengths = settings.lengths_for(one.description["training_length"] for one in found)
    tokens = settings.tokens_for(lengths, found[0].available, f"{found[0].fingerprint['path']}/val")
    measured = _measure_all(files, settings, lengths, tokens)
    arms = group_by_seed([one.origin for one in found])
    results = Results(arms, measured, lengths, list(settings.masking), tokens, math.lcm(*lengths))
    record |= {
        "device": device_name(device),
        "checkpoints": [one.description for one in found],
        "data": found[0].fingerprint,
        "settings": asdict(settings) | {"lengths": lengths, "tokens": tokens},
        "arms": [_arm(results, arm) for arm in arms],
        "measurements": [[one.raw() for one in of_checkpoint] for of_checkpoint in measured],
    }
    return results, record, _notes(found, settings, tokens)


def _load_candidate(file: Path, data_path: str | None) -> Candidate:
    """Load a checkpoint and its data once before measuring, so that all errors come first."""
    checkpoint = load_checkpoint(str(file), "cpu")
    data = data_of(checkpoint, data_path)
    available = available_targets(data)
    masked = checkpoint.model.model.document_masking
    return Candidate(Origin.of(checkpoint), describe(checkpoint), data.fingerprint, available, masked)


def _refuse_different_data(found: list[Candidate]) -> None:
    first = found[0]
    for other in found[1:]:
        if other.fingerprint["content_sha256"] != first.fingerprint["content_sha256"]:
            raise UserError(
                f"{first.origin.file} and {other.origin.file} have different data ({first.fingerprint['path']} and "
                f"{other.fingerprint['path']}), and losses on different tokens cannot be compared: set --data"
            )


def _measure_all(files: list[Path], settings: Settings, lengths: list[int], tokens: int) -> list[list[Measurement]]:
    measured = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(files) * len(lengths) * len(settings.masking))
        for file in files:
            checkpoint = load_checkpoint(str(file), settings.device)
            data = data_of(checkpoint, settings.data)

            def tell(one: Measurement, file: Path = file) -> None:
                progress.advance(task)
                masked = "masked" if one.masking else "not masked"
                line = f"{file}: {one.total.loss:.4f} at {one.length:,}, documents {masked}"
                progress.console.print(line, soft_wrap=True, highlight=False)

            arguments = (lengths, list(settings.masking), tokens, settings.batch_tokens)
            measured.append(measure(checkpoint, data, *arguments, tell))
    return measured


def _arm(results: Results, arm: Arm) -> dict[str, Any]:
    """An arm in the record: its checkpoints, and the loss over its seeds."""
    losses = []
    for masked in results.masking:
        for length in results.lengths:
            mean, sd = mean_and_sd([one.total.loss for one in results.of_arm(arm, length, masked)])
            losses.append({"length": length, "masking": masked, "mean": mean, "sd": sd})
    return {"label": arm.label, "checkpoints": list(arm.members), "loss": losses}


def _notes(found: list[Candidate], settings: Settings, tokens: int) -> list[str]:
    notes = []
    if settings.tokens is not None and tokens != settings.tokens:
        notes.append(
            f"Evaluated on {tokens:,} tokens and not {settings.tokens:,}: the number must be a multiple of every "
            f"length, and the validation split has {found[0].available:,}."
        )
    trained = {one.masked for one in found}
    if trained != set(settings.masking):
        modes = " and ".join("with" if masked else "without" for masked in sorted(trained, reverse=True))
        notes.append(f"The models were trained {modes} document masking.")
    return notes
