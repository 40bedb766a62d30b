"""What a reader of a comparison must know: one sentence for each thing that makes it less fair or less certain.

A comparison without meaning is refused, see `refuse_other_tokenizers`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anlit.compare.statistics import SpeedUp, tokens_to_loss
from anlit.config.labels import init_args
from anlit.config.schema import MODEL, TUNING, VALIDATION, changes_measure, setting_of
from anlit.errors import UserError
from anlit.runs.folders import Run, commit_label, hardware_label
from anlit.runs.groups import Group, records
from anlit.runs.labels import differing, short_names, show

PARAMETERS_APART, TOKENS_APART, THROUGHPUT_APART = 0.05, 0.01, 1 - 1 / 1.10
"""Shares of the larger value by which two may differ without a note; one may be 10 % faster than the other."""
LEAST_HALVED = 5
"""The fewest validation points for two halves. The first interval is left out, because compilers warm up in it."""
LEAST_PARTED, GAP = 4, 3.0
EARLY = 0.9
"""The share of the baseline's tokens before which its own final loss comes with a note."""


def refuse_other_tokenizers(groups: Sequence[Group]) -> None:
    """Raises a UserError if two runs recorded different tokenizers: nats per token mean nothing across them."""
    folders = {
        run.tokenizer_hash: run.folder
        for group in groups
        for run in group.counted
        if run.tokenizer_hash
    }
    if len(folders) > 1:
        (ours, folder), (theirs, other) = list(folders.items())[:2]
        hashes = f"{ours[:12]}, {theirs[:12]}"
        raise UserError(f"{folder} and {other} were trained with different tokenizers ({hashes}), whose losses per "
                        "token cannot be compared: give only runs that share a tokenizer.")  # fmt: skip


def notes_on(
    speedups: dict[Group, SpeedUp], every: Sequence[Group], runs: Sequence[Run]
) -> list[str]:
    """All notes, given the speed-up of each compared group, the baseline first; all groups, and all runs."""
    (baseline, *others), groups = speedups, [group for group in every if group.counted]
    notes = [note for group in every for note in _states(group)]
    notes += [
        f"{run.folder}: not counted, because it has no config.yaml."
        for run in runs
        if not run.config
    ]
    for group in groups:
        notes += [
            *_within(group),
            *(_against(group, baseline, speedups[group]) if group in others else ()),
        ]
    curve = baseline.mean()[0]
    share = (tokens_to_loss(curve, curve.loss[-1]) or curve.tokens[-1]) / curve.tokens[-1]
    if share < EARLY:
        notes += [
            f"{baseline.label}: has its own final loss after {share:.0%} of its tokens, where speed-ups count."
        ]
    return [
        *notes,
        *_across([run for group in groups for run in group.counted]),
        *unstable_throughput(groups),
    ]


def parted(losses: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Final losses in two groups, if a gap of more than three times the larger range within parts them.

    Of fewer than four runs nothing is said: of three numbers drawn by chance half are parted so.
    """
    if len(ordered := sorted(losses)) < LEAST_PARTED:
        return None
    at = int(np.argmax(np.diff(ordered))) + 1
    low, high = ordered[:at], ordered[at:]
    return (low, high) if high[0] - low[-1] > GAP * max(np.ptp(low), np.ptp(high)) else None


def _states(group: Group) -> Iterator[str]:
    """Whether the numbers of a group do not come from all its runs, or from unfinished ones."""
    states = Counter("equal to another run" if run.complete or (group.unfinished and run.comparable) else run.state
                     for run in group.runs if run not in group.counted)  # fmt: skip
    others = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    if not group.counted:
        yield f"{group.label}: not counted, because none of its runs can be compared ({others})."
    elif others:
        yield f"{group.label}: {len(group.counted)} of {len(group.runs)} runs are counted; left out: {others}."
    if group.counted and (
        lost := ", ".join(f"{run.folder.name} ({run.state})" for run in group.lost)
    ):
        yield f"{group.label}: LOST {lost}; a lost run counts as a seed, so there is no mean loss, test or speed-up."
    if group.counted and group.unfinished:
        yield f"{group.label}: UNFINISHED, its final loss is the last one so far."


def _within(group: Group) -> Iterator[str]:
    """Differences between the runs of a group."""
    if groups := parted([run.final_loss for run in group.counted]):
        low, high = (", ".join(f"{loss:.4f}" for loss in losses) for losses in groups)
        yield (f"{group.label}: TWO GROUPS of final losses, {low} and {high}; the mean lies between them and says "
               "nothing.")  # fmt: skip
    n_words = group.settings.get("model.init_args.vocab_size")
    guessing = np.log(n_words) if isinstance(n_words, int) else np.inf
    for run in (run for run in group.counted if run.final_loss > guessing + 1):
        yield f"{run.folder}: DIVERGED in effect, its final loss is above that of guessing, {guessing:.1f}."
    if (
        len(data := sorted({run.content_hash[:12] for run in group.counted if run.content_hash}))
        > 1
    ):
        yield f"{group.label}: its runs were trained on DIFFERENT DATA, content {' and '.join(data)}."
    seeds = Counter(run.seed for run in group.counted)
    if twice := ", ".join(str(seed) for seed, count in seeds.items() if count > 1):
        yield f"{group.label}: seed {twice} occurs more than once, so its runs are not independent."
    if _apart([run.curve.tokens[-1] for run in group.counted], TOKENS_APART):
        yield f"{group.label}: its runs ended after different numbers of tokens."
    for run in (run for run in group.counted if run.record.get("stopped_early")):
        yield f"{run.folder} ended early, after {run.record['stopped_early']}."
    for run in (run for run in group.counted if run.changes):
        yield f"{run.folder} changed on the way: {'; '.join(run.changes)}."


def _against(group: Group, baseline: Group, speedup: SpeedUp) -> Iterator[str]:
    """Differences from the baseline in seeds, in what is learned, for how long and by how large a model."""
    if not speedup.paired:
        yield f"{group.label}: no seed in common with the baseline, so its speed-up is over the baseline's mean curve."
    elif (
        0
        < (pairs := len(speedup.values))
        < max(len(each.final_losses()) for each in (group, baseline))
    ):
        what, seeds = ("speed-up and test are", "seeds") if pairs > 1 else ("speed-up is", "seed")
        yield f"{group.label}: its {what} of the {pairs} {seeds} that it has in common with the baseline."
    ours, theirs = _task(group), _task(baseline)
    for key, name in short_names(differing([ours, theirs])).items():
        of_validation = setting_of(key).role is VALIDATION
        kind = "validated differently" if of_validation else "trained differently"
        kind = "other data" if key in ("data.content", "data.tokenizer") else kind
        yield f"{group.label}: {kind}: {name} is {show(ours, key)}, the baseline {show(theirs, key)}."
    if group.architecture != baseline.architecture:
        own, others = ({key: value for key, value in each.settings.items() if setting_of(key).role is TUNING}
                       for each in (group, baseline))  # fmt: skip
        names = short_names(differing([own, others]))
        said = [
            ", ".join(f"{name}={show(each, key)}" for key, name in names.items())
            for each in (own, others)
        ]
        if names:
            yield f"{group.label}: its own {said[0]}, the baseline's {said[1]}; fair only if both were tuned alike."
    first, other = group.counted[0], baseline.counted[0]
    tokens = [float(run.curve.tokens[-1]) for run in (first, other)]
    if not group.unfinished and _apart(tokens, TOKENS_APART):
        yield (f"{group.label}: {tokens[0]:,.0f} training tokens, the baseline {tokens[1]:,.0f}; a schedule of another "
               "length changes every point of a curve.")  # fmt: skip
    if (
        first.parameters
        and other.parameters
        and _apart([first.parameters, other.parameters], PARAMETERS_APART)
    ):
        yield f"{group.label}: {first.parameters:,} parameters, the baseline {other.parameters:,}."


def _across(runs: Sequence[Run]) -> Iterator[str]:
    """Differences between machines, commits and versions, and what was not recorded."""
    if any(run.tokenizer_hash is None or run.content_hash is None for run in runs):
        yield "A run did not record its data, so the same corpus and tokenizer of all runs are not verified."
    launches = [launch for run in runs for launch in run.launches]
    if len(hardware := {hardware_label(launch) or "not recorded" for launch in launches}) > 1:
        yield f"Hardware differs, so the seconds of the runs do not compare ({'; '.join(sorted(hardware))})."
    if len(set(map(commit_label, launches))) > 1:
        yield "The runs were made with different commits of the code."
    if any("+dirty" in (run.commit or "") for run in runs):
        yield "A run was made with uncommitted changes, so its commit alone does not reproduce it."
    if len(records(runs, "versions")) > 1:
        yield "The runs were made with different versions of python or its packages."


def unstable_throughput(groups: Sequence[Group]) -> Iterator[str]:
    """One sentence for each run whose halves were not equally fast; a growing context would explain it."""
    for run in (run for group in groups for run in group.counted):
        curve, settings = run.curve.finite(), init_args(run.config.get("data"))
        if len(curve) < LEAST_HALVED or any(
            settings[key] for key in settings if key.endswith("context_schedule")
        ):
            continue
        ends = [1, (len(curve) - 1) // 2 + 1, -1]
        first, second = np.diff(curve.tokens[ends]) / np.diff(curve.seconds[ends])
        if _apart([first, second], THROUGHPUT_APART):  # not where times are not known, NaN
            yield (f"{run.folder.name}: unstable throughput, {first:,.0f} tokens/s in its first half and "
                   f"{second:,.0f} in its second; its seconds are not comparable.")  # fmt: skip


def measured_apart(group: Group, baseline: Group) -> bool:
    """Whether the losses of two groups are on other texts, or on others of their tokens."""
    ours, theirs = _task(group), _task(baseline)
    known = "data.content" in ours and "data.content" in theirs
    return any(
        changes_measure(key) or (key == "data.content" and known)
        for key in differing([ours, theirs])
    )


def _task(group: Group) -> dict[str, Any]:
    """Settings that define what is learned and measured, as opposed to the model that learns it."""
    return {key: value for key, value in group.settings.items()
            if setting_of(key).role not in (MODEL, TUNING)}  # fmt: skip


def _apart(values: Sequence[float], share: float) -> bool:
    """Whether the smallest of some values is less than the largest by more than a share of the largest."""
    return bool(values) and max(values) - min(values) > share * max(values)
