"""Scores several checkpoints on the same needles, with one model in memory at a time."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from anlit.checkpoints.loading import describe, device_name, find_device, find_file, load_checkpoint
from anlit.errors import UserError
from anlit.evaluation.arms import Origin, group_by_seed
from anlit.evaluation.data import data_of
from anlit.evaluation.needle.haystack import Haystack
from anlit.evaluation.needle.report import ArmScores, Results
from anlit.evaluation.needle.score import Scores, measure
from anlit.evaluation.needle.settings import Settings
from anlit.evaluation.record import header


class Candidate(NamedTuple):
    """A checkpoint that has passed all checks."""

    origin: Origin
    description: dict[str, Any]
    fingerprint: dict[str, Any]
    """Fingerprint of the data of its haystacks."""
    haystack: Haystack


def run(paths: list[str], settings: Settings, command: str) -> tuple[Results, dict[str, Any]]:
    """The results, and the record with all numbers.

    Raises:
        UserError: A checkpoint, the data or a setting is wrong. If possible it is raised before anything is measured.
    """
    record = header(command, [])
    device = find_device(settings.device)
    files = list({file.resolve(): file for file in map(find_file, paths)}.values())
    found = [_load_candidate(file, settings.data) for file in files]
    _refuse_different_data(found)
    training_lengths = sorted({one.description["training_length"] for one in found})
    lengths = settings.lengths_for(training_lengths)
    for length in lengths:
        found[0].haystack.check(length)
    scores = _measure_all(files, found, settings, lengths)
    arms = [
        ArmScores(arm.label, arm.members, tuple(scores[member] for member in arm.members))
        for arm in group_by_seed([one.origin for one in found])
    ]
    results = Results(arms, lengths, settings.depths, settings.n_samples, training_lengths)
    record |= {
        "device": device_name(device),
        "checkpoints": [one.description for one in found],
        "data": found[0].fingerprint,
        "settings": asdict(settings) | {"lengths": lengths, "depths": settings.depths},
        "arms": [_arm(arm, lengths) for arm in arms],
        "measurements": [[_scores(by_length[length]) for length in lengths] for by_length in scores],
    }
    return results, record


def _load_candidate(file: Path, data_path: str | None) -> Candidate:
    """Load a checkpoint and its data once before measuring, so that all errors come first."""
    checkpoint = load_checkpoint(str(file), "cpu")
    data = data_of(checkpoint, data_path)
    return Candidate(Origin.of(checkpoint), describe(checkpoint), data.fingerprint, Haystack.of(data, "val"))


def _refuse_different_data(found: list[Candidate]) -> None:
    first = found[0]
    for other in found[1:]:
        if other.fingerprint["content_sha256"] != first.fingerprint["content_sha256"]:
            raise UserError(
                f"{first.origin.file} and {other.origin.file} have different data ({first.fingerprint['path']} and "
                f"{other.fingerprint['path']}), and would search different texts: set --data, or run twice"
            )


def _measure_all(
    files: list[Path], found: list[Candidate], settings: Settings, lengths: list[int]
) -> list[dict[int, Scores]]:
    """The scores of each checkpoint, by length."""
    n_samples = settings.n_depths * settings.n_samples
    scores: list[dict[int, Scores]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        # The cost of a sample grows with its length, or faster if attention dominates.
        task = progress.add_task("searching", total=len(files) * n_samples * sum(lengths))
        for file, candidate in zip(files, found, strict=True):
            model = load_checkpoint(str(file), settings.device).model
            scores.append({})
            for length in lengths:

                def tell(n: int, length: int = length) -> None:
                    progress.advance(task, n * length)

                arguments = (length, settings.depths, settings.n_samples, settings.seed)
                scores[-1][length] = measure(model, candidate.haystack, *arguments, tell)
    return scores


def _arm(arm: ArmScores, lengths: list[int]) -> dict[str, Any]:
    """An arm in the record: its checkpoints, and the means over them."""
    found = [
        {
            "length": length,
            "accuracy": arm.accuracy(length),
            "accuracy_sd": arm.accuracy_sd(length),
            "interval_95": arm.interval(length),
            "nats_per_token": _finite(arm.nats_per_token(length)),
        }
        for length in lengths
    ]
    return {"label": arm.label, "checkpoints": list(arm.members), "lengths": found}


def _scores(scores: Scores) -> dict[str, Any]:
    """One checkpoint at one length in the record, by depth."""
    by_depth = [
        {
            "depth": float(scores.asked[i]),
            "mean_depth": float(scores.depth[i].mean()),
            "matches": int(scores.match[i].sum()),
            "samples": int(scores.match[i].size),
            "nats_per_token": _finite(float(scores.log_likelihood[i].sum() / scores.n_answer[i].sum())),
        }
        for i in range(len(scores.asked))
    ]
    mean = {"accuracy": scores.accuracy, "nats_per_token": _finite(scores.nats_per_token)}
    return {"length": scores.length, **mean, "by_depth": by_depth}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
