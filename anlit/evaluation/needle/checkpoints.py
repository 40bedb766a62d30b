"""Scores several checkpoints on the same needles, with one model in memory at a time."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress

from anlit.checkpoints.loading import device_name, find_device, load_checkpoint
from anlit.evaluation.arms import Candidate, group_by_seed, load_candidates
from anlit.evaluation.needle.haystack import Haystack
from anlit.evaluation.needle.score import Scores, measure
from anlit.evaluation.needle.settings import Settings
from anlit.evaluation.needle.tables import ArmScores, Results
from anlit.evaluation.record import header
from anlit.evaluation.sequence_lengths import lengths_for


def score_all(paths: list[str], settings: Settings, command: str) -> tuple[Results, dict[str, Any]]:
    """The results, and the record with all numbers.

    Raises:
        UserError: A checkpoint, the data or a setting is wrong. If possible it is raised before anything is measured.
    """
    record = header(command)
    device = find_device(settings.device)
    found = load_candidates(paths, settings.data)
    haystack = Haystack.of(found[0].data, "val")
    training_lengths = sorted({one.description["training_length"] for one in found})
    lengths = lengths_for(settings.lengths, training_lengths)
    for length in lengths:
        haystack.check(length)
    scores = _scored(found, haystack, settings, lengths)
    arms = [
        ArmScores(arm.label, arm.members, tuple(scores[member] for member in arm.members))
        for arm in group_by_seed(found)
    ]
    record |= {
        "device": device_name(device),
        "checkpoints": [one.description for one in found],
        "data": found[0].data.fingerprint,
        "settings": asdict(settings) | {"lengths": lengths, "depths": settings.depths},
        "arms": [_arm(arm, lengths) for arm in arms],
        "measurements": [[_scores(by_length[length]) for length in lengths] for by_length in scores],
    }
    return Results(arms, lengths, settings.depths, settings.n_samples, training_lengths), record


def _scored(
    found: list[Candidate], haystack: Haystack, settings: Settings, lengths: list[int]
) -> list[dict[int, Scores]]:
    """The scores of each checkpoint, by length."""
    n_samples = settings.n_depths * settings.n_samples
    scores: list[dict[int, Scores]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        # The cost of a sample grows with its length, or faster if attention dominates.
        task = progress.add_task("searching", total=len(found) * n_samples * sum(lengths))
        for candidate in found:
            model = load_checkpoint(str(candidate.file), settings.device).model
            scores.append({})
            for length in lengths:

                def tell(n: int, length: int = length) -> None:
                    progress.advance(task, n * length)

                arguments = (length, settings.depths, settings.n_samples, settings.seed)
                scores[-1][length] = measure(model, haystack, *arguments, tell)
    return scores


def _arm(arm: ArmScores, lengths: list[int]) -> dict[str, Any]:
    """An arm in the record: its checkpoints, and the means over them."""
    found = [
        {
            "length": length,
            "accuracy": arm.accuracy(length),
            "accuracy_sd": arm.accuracy_sd(length),
            "interval_95": arm.interval(length),
            "nats_per_token": arm.nats_per_token(length),
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
            "nats_per_token": float(scores.log_likelihood[i].sum() / scores.n_answer[i].sum()),
        }
        for i in range(len(scores.asked))
    ]
    mean = {"accuracy": scores.accuracy, "nats_per_token": scores.nats_per_token}
    return {"length": scores.length, **mean, "by_depth": by_depth}
