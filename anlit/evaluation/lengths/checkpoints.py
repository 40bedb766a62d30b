"""Measures several checkpoints on the same tokens, with one model in memory at a time."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress

from anlit.checkpoints.loading import device_name, find_device, load_checkpoint
from anlit.evaluation.arms import Arm, Candidate, group_by_seed, load_candidates
from anlit.evaluation.data import available_targets, data_of
from anlit.evaluation.lengths.measure import Measurement, measure
from anlit.evaluation.lengths.settings import Settings
from anlit.evaluation.lengths.tables import Results
from anlit.evaluation.record import header
from anlit.evaluation.sequence_lengths import lengths_for
from anlit.reporting.intervals import Summary


def measure_all(paths: list[str], settings: Settings, command: str) -> tuple[Results, dict[str, Any], list[str]]:
    """The results, the record with all numbers, and notes for the reader.

    Raises:
        UserError: A checkpoint, the data or a setting is wrong. If possible it is raised before anything is measured.
    """
    record = header(command)
    device = find_device(settings.device)
    found = load_candidates(paths, settings.data)
    data = found[0].data.fingerprint
    available = available_targets(found[0].data)
    lengths = lengths_for(settings.lengths, (one.description["training_length"] for one in found))
    tokens = settings.tokens_for(lengths, available, f"{data['path']}/val")
    measured = _measured(found, settings, lengths, tokens)
    results = Results(group_by_seed(found), measured, lengths, list(settings.masking), tokens, math.lcm(*lengths))
    record |= {
        "device": device_name(device),
        "checkpoints": [one.description for one in found],
        "data": data,
        "settings": asdict(settings) | {"lengths": lengths, "tokens": tokens},
        "arms": [_arm(results, arm) for arm in results.arms],
        "measurements": [[asdict(one) for one in of_checkpoint] for of_checkpoint in measured],
    }
    return results, record, _notes(found, settings, tokens, available)


def _measured(found: list[Candidate], settings: Settings, lengths: list[int], tokens: int) -> list[list[Measurement]]:
    measured = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(found) * len(lengths) * len(settings.masking))
        for candidate in found:
            checkpoint = load_checkpoint(str(candidate.file), settings.device)

            def tell(one: Measurement, candidate: Candidate = candidate) -> None:
                progress.advance(task)
                masked = "masked" if one.masking else "not masked"
                line = f"{candidate.file}: {one.total.loss:.4f} at {one.length:,}, documents {masked}"
                progress.console.print(line, soft_wrap=True, highlight=False)

            arguments = (lengths, list(settings.masking), tokens, settings.batch_tokens)
            measured.append(measure(checkpoint, data_of(checkpoint, settings.data), *arguments, tell))
    return measured


def _arm(results: Results, arm: Arm) -> dict[str, Any]:
    """An arm in the record: its checkpoints, and the loss over its seeds."""
    losses = []
    for masked in results.masking:
        for length in results.lengths:
            loss = Summary(tuple(one.total.loss for one in results.of_arm(arm, length, masked)))
            losses.append({"length": length, "masking": masked, "mean": loss.mean, "sd": loss.sd})
    return {"label": arm.label, "checkpoints": list(arm.members), "loss": losses}


def _notes(found: list[Candidate], settings: Settings, tokens: int, available: int) -> list[str]:
    notes = []
    if settings.tokens is not None and tokens != settings.tokens:
        notes.append(
            f"Evaluated on {tokens:,} tokens and not {settings.tokens:,}: the number must be a multiple of every "
            f"length, and the validation split has {available:,}."
        )
    trained = {one.masked for one in found}
    if trained != set(settings.masking):
        modes = " and ".join("with" if masked else "without" for masked in sorted(trained, reverse=True))
        notes.append(f"The models were trained {modes} document masking.")
    return notes
