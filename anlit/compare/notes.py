"""Notes on a comparison: each tells a fact that makes it less fair or less certain.

A comparison without meaning is refused, see `refuse_other_tokenizers`. Notes on tokenizers are in
`anlit.compare.tokenizers`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anlit.compare.crossings import tokens_to_loss
from anlit.compare.statistics import SpeedUp
from anlit.compare.tokenizers import (
    block_length,
    has_other_tokenizer,
    notes_across_tokenizers,
    obstacle_across_tokenizers,
    tokenizers_of,
)
from anlit.config.labels import init_args, mapping
from anlit.config.schema import (
    CORPUS,
    MODEL,
    PATHS,
    TUNING,
    VALIDATION,
    changes_measure,
    schema_key,
    setting_of,
)
from anlit.errors import UserError
from anlit.reporting.text import count_of
from anlit.runs.folders import Run, commit_label, hardware_label
from anlit.runs.groups import ATTENTION, Group, counted_runs, records
from anlit.runs.labels import differing, short_names, show
from anlit.runs.measure import BITS_PER_BYTE

PARAMETERS_APART = 0.05
"""Share of the larger number by which parameters may differ without a note."""
TOKENS_APART = 0.01
"""Share of the larger number by which training tokens may differ without a note."""
FEWEST_LOSSES = 4
"""The fewest final losses that may form two groups: of three drawn by chance, half do."""
LEAST_GAPS = {4: 10.5, 5: 5.0, 6: 3.1}
"""Number of losses → the least gap between two groups, in ranges of the wider group.

At each number 2 % of sets of normal losses have such a gap (simulated).
"""
LEAST_GAP = 3.0
"""The least gap of more losses: fewer than 1 % of sets of normal losses have it."""
EARLY = 0.9
"""The share of the baseline's tokens before which its own final loss comes with a note."""
WIDE = 1.3
"""The ratio of a speed-up's limits from which a note tells that validations are far apart.

A line between two points of a power law with a small exponent is then 1 % late; at 2 it is 8 %.
"""
LASTING = 1.05
"""The ratio of the speed-ups to the first and to the last crossing from which a note has both."""
CONTENT = "data.content"
TOKENIZER = "data.tokenizer"
INITIAL_WEIGHTS = "initial_weights"
FOLLOWS_TOKENIZER = (
    CONTENT,
    TOKENIZER,
    "model.vocab_size",
    "data.vocab_size",
    "data.val_context_length",
)
"""Settings that differ with the tokenizer, about which a comparison across tokenizers has notes."""
ACROSS_TOKENIZERS = (
    "Tokenizers differ: losses are in bits per byte of validation text, and curves and speed-ups "
    "run over bytes of training text, tokens × the training split's bytes per token."
)


def refuse_other_tokenizers(groups: Sequence[Group]) -> None:
    """Raise UserError if two runs have different tokenizers: nats per token do not compare."""
    runs = tokenizers_of(counted_runs(groups))
    if len(runs) > 1:
        first, second, *_ = runs
        raise UserError(
            f"{runs[first].folder} and {runs[second].folder} were trained with different "
            f"tokenizers ({first[:12]}, {second[:12]}), whose losses per token cannot "
            "be compared: give only runs that share a tokenizer"
        )


def notes_on(
    speedups: dict[Group, SpeedUp], groups: Sequence[Group], runs: Sequence[Run]
) -> list[str]:
    """All notes.

    Args:
        speedups: The speed-up of each compared group, the baseline first.
        groups: All groups, also those without a counted run.
        runs: All runs, also those in no group.
    """
    baseline = next(iter(speedups))
    counted = [group for group in groups if group.counted]
    notes: list[str] = []
    if baseline.measure is BITS_PER_BYTE:
        notes.append(ACROSS_TOKENIZERS)
    for group in groups:
        notes += _notes_on_states(group)
    for run in runs:
        if not run.config:
            notes.append(f"{run.folder}: not counted, because it has no config.yaml.")
    for group in counted:
        notes += _notes_within(group)
        if group is not baseline and group in speedups:
            notes += _notes_against(group, baseline, speedups[group])
    notes += _note_on_target(baseline)
    notes += _notes_across(counted_runs(counted))
    return notes


def _notes_on_states(group: Group) -> Iterator[str]:
    """Tell if numbers of a group come from a part of its runs, or from unfinished runs."""
    states = Counter(_state(run, group) for run in group.runs if run not in group.counted)
    left_out = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    if not group.counted:
        yield f"{group.label}: not counted, because none of its runs can be compared ({left_out})."
        return
    if left_out:
        counts = f"{len(group.counted)} of {len(group.runs)} runs are counted"
        yield f"{group.label}: {counts}; left out: {left_out}."
    lost = ", ".join(f"{run.folder.name} ({run.state})" for run in group.lost)
    if lost:
        consequence = "a lost run counts as a seed, so there is no mean loss, test or speed-up"
        yield f"{group.label}: LOST {lost}; {consequence}."
    if group.unfinished:
        yield f"{group.label}: UNFINISHED, its final loss is the last one so far."


def _state(run: Run, group: Group) -> str:
    """Why a run of a group is not counted."""
    is_repeated = run.complete or (group.unfinished and run.comparable)
    return "of the seed of a later run" if is_repeated else run.state


def _notes_within(group: Group) -> Iterator[str]:
    """Differences between the runs of a group."""
    split = split_by_gap([group.measure.final_loss_of(run) for run in group.counted])
    if split:
        low, high = map(_losses_in_words, split)
        consequence = "the mean lies between them and says nothing"
        yield f"{group.label}: TWO GROUPS of final losses, {low} and {high}; {consequence}."
    guessing = _loss_of_guessing(group)
    for run in group.counted:
        if run.final_loss > guessing + 1:
            cause = f"its final loss is above that of guessing, {guessing:.1f}"
            yield f"{run.folder}: DIVERGED in effect, {cause}."
    contents = sorted({run.content_hash[:12] for run in group.counted if run.content_hash})
    if len(contents) > 1:
        names = " and ".join(contents)
        yield f"{group.label}: its runs were trained on DIFFERENT DATA, content {names}."
    if len({run.begun_from for run in group.counted}) > 1:
        yield f"{group.label}: its runs began from the weights of DIFFERENT CONFIGURATIONS."
    seeds = Counter(run.seed for run in group.counted)
    repeated = ", ".join(str(seed) for seed, count in seeds.items() if count > 1)
    if repeated:
        consequence = "so its runs are not independent"
        yield f"{group.label}: seed {repeated} occurs more than once, {consequence}."
    if _is_apart([run.curve.tokens[-1] for run in group.counted], TOKENS_APART):
        yield f"{group.label}: its runs ended after different numbers of tokens."
    averaging = sorted({run.averaged_by for run in group.counted if run.averaged_by})
    if averaging:
        yield f"{group.label}: validated with averaged weights ({' and '.join(averaging)})."
    for run in group.counted:
        n_lost = len(run.curve) - len(run.curve.finite())
        if n_lost:
            fact = f"{n_lost} of its {len(run.curve)} validation losses are NaN or infinite"
            yield f"{run.folder}: {fact}; its curve is a line across them."
    for run in group.counted:
        if run.record.get("stopped_early"):
            yield f"{run.folder} ended early, after {run.record['stopped_early']}."
    for run in group.counted:
        if run.changes:
            yield f"{run.folder} changed on the way: {'; '.join(run.changes)}."


def _losses_in_words(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in losses)


def split_by_gap(losses: Sequence[float]) -> tuple[list[float], list[float]] | None:
    """Final losses in two groups, if a gap that is rare by chance separates them.

    None for fewer than `FEWEST_LOSSES`.
    """
    ordered = sorted(losses)
    if len(ordered) < FEWEST_LOSSES:
        return None
    n_low = int(np.argmax(np.diff(ordered))) + 1
    low = ordered[:n_low]
    high = ordered[n_low:]
    least_gap = LEAST_GAPS.get(len(ordered), LEAST_GAP)
    is_split = high[0] - low[-1] > least_gap * max(np.ptp(low), np.ptp(high))
    return (low, high) if is_split else None


def _loss_of_guessing(group: Group) -> float:
    """Nats per token of a uniform guess; infinite if the vocabulary is not known."""
    n_tokens = group.settings.get("model.init_args.vocab_size")
    return float(np.log(n_tokens)) if isinstance(n_tokens, int) else np.inf


def _notes_against(group: Group, baseline: Group, speedup: SpeedUp) -> Iterator[str]:
    """Differences from the baseline in seeds, in the task, in tokens and parameters."""
    if not speedup.paired:
        consequence = "so its speed-up is over the baseline's mean curve, without an interval"
        yield f"{group.label}: no seed in common with the baseline, {consequence}."
    if speedup.risen:
        runs = f"{speedup.risen} of its {len(speedup.values)} runs"
        fact = "had the baseline's final loss and END ABOVE it"
        consequence = "its speed-up counts to the first crossing"
        yield f"{group.label}: {runs} {fact}; {consequence}."
    if speedup.mean and speedup.lasting and speedup.mean > LASTING * speedup.lasting:
        fact = "a run has the baseline's final loss, RISES ABOVE it and has it again"
        consequence = f"to the last crossing its speed-up is {speedup.lasting:.2f}"
        yield f"{group.label}: {fact}; {consequence}."
    if speedup.missing:
        n_pairs = count_of(len(speedup.values), "common seed")
        fact = f"lacks {speedup.missing} of the baseline's seeds"
        consequence = f"its speed-up is of {n_pairs}, the baseline's mean loss of all its seeds"
        yield f"{group.label}: {fact}; {consequence}."
    if speedup.limits and not speedup.bound:
        low, high = speedup.limits
        if high > WIDE * low:
            fact = f"validations are far apart, so its speed-up is between {low:.2f} and {high:.2f}"
            consequence = "lines give the value, and its interval is of the seeds alone"
            yield f"{group.label}: {fact}; {consequence}."
    yield from _notes_on_task(group, baseline)
    if has_other_tokenizer(group, baseline):
        yield from notes_across_tokenizers(group, baseline)
    unknown_data = _unknown_data(group, baseline)
    if unknown_data:
        cause = f"{unknown_data} gives no fingerprint and its settings differ, give it one"
        yield f"{group.label}: validated on data that may be other data: {cause}."
    yield from _note_on_tuning(group, baseline)
    run = group.counted[0]
    baseline_run = baseline.counted[0]
    length = float(group.measure.curve_of(run).tokens[-1])
    baseline_length = float(group.measure.curve_of(baseline_run).tokens[-1])
    if not group.unfinished and _is_apart([length, baseline_length], TOKENS_APART):
        counts = f"{length:,.0f} {group.measure.length}, the baseline {baseline_length:,.0f}"
        consequence = "a schedule of another length changes every point of a curve"
        yield f"{group.label}: {counts}; {consequence}."
    parameters = [run.parameters or 0, baseline_run.parameters or 0]
    if all(parameters) and _is_apart(parameters, PARAMETERS_APART):
        counts = f"{parameters[0]:,} parameters, the baseline {parameters[1]:,}"
        yield f"{group.label}: {counts}."


def _notes_on_task(group: Group, baseline: Group) -> Iterator[str]:
    """Settings of the task that differ: they should be the same for a fair comparison."""
    settings = _task(group)
    baseline_settings = _task(baseline)
    is_across_tokenizers = has_other_tokenizer(group, baseline)
    for key, name in short_names(differing([settings, baseline_settings])).items():
        if is_across_tokenizers and schema_key(key) in FOLLOWS_TOKENIZER:
            continue
        if key in (CONTENT, TOKENIZER):
            kind = "other data"
        elif setting_of(key).role is VALIDATION:
            kind = "validated differently"
        else:
            kind = "trained differently"
        values = f"{show(settings, key)}, the baseline {show(baseline_settings, key)}"
        if key == INITIAL_WEIGHTS:
            values += "; the tokens of EARLIER TRAINING are not counted"
        yield f"{group.label}: {kind}: {name} is {values}."


def _note_on_tuning(group: Group, baseline: Group) -> Iterator[str]:
    """Rates and decays that differ, which each configuration may have for itself.

    Labels that show them, such as `GPT+, plain, lr=0.01`, need no note.
    """
    settings = _tuning(group)
    baseline_settings = _tuning(baseline)
    names = short_names(differing([settings, baseline_settings]))
    names = _hidden_by_labels(group, baseline, names)
    if names:
        values = _in_words(settings, names)
        baseline_values = _in_words(baseline_settings, names)
        condition = "fair only if both were tuned alike"
        yield f"{group.label}: its own {values}, the baseline's {baseline_values}; {condition}."


def note_on_model(group: Group, baseline: Group) -> Iterator[str]:
    """Settings of the model that differ, that both models have, and that the labels hide.

    A label has no settings if the runs have a name, or if the architecture tells them apart.
    """
    keys = []
    for key in differing([_model(group), _model(baseline)]):
        if _has_setting(group, key) and _has_setting(baseline, key):
            keys.append(key)
    names = _hidden_by_labels(group, baseline, short_names(keys))
    if names:
        values = _in_words(group.settings, names)
        baseline_values = _in_words(baseline.settings, names)
        yield f"{group.label}: another model, {values}; the baseline has {baseline_values}."


def differs_in_tuning_alone(group: Group, other: Group) -> bool:
    """Whether two groups train the same model on the same task, with other rates or decays."""
    keys = differing([group.settings, other.settings])
    return all(setting_of(key).role is TUNING for key in keys)


def _hidden_by_labels(group: Group, baseline: Group, names: dict[str, str]) -> dict[str, str]:
    """The settings, by their key and short name, that a label of the two groups lacks."""
    hidden = {}
    for key, name in names.items():
        if not (_label_shows(group, key, name) and _label_shows(baseline, key, name)):
            hidden[key] = name
    return hidden


def _label_shows(group: Group, key: str, name: str) -> bool:
    value = show(group.settings, key)
    texts = {value, f"{name}={value}"}  # a class is shown without the name
    if key == f"{ATTENTION}.class_path":
        texts.add(group.counted[0].attention)
    return not texts.isdisjoint(group.label.split(", "))


def _has_setting(group: Group, key: str) -> bool:
    """Whether the model of a group takes this setting, also if it is null."""
    name = schema_key(key).split(".")[1]
    return name in init_args(group.counted[0].config.get("model"))


def _in_words(settings: dict[str, Any], names: dict[str, str]) -> str:
    return ", ".join(f"{name}={show(settings, key)}" for key, name in names.items())


def _note_on_target(baseline: Group) -> Iterator[str]:
    """Whether the baseline had its final loss long before its end."""
    curve, _ = baseline.mean()
    last = curve.tokens[-1]
    share = (tokens_to_loss(curve, curve.loss[-1]) or last) / last
    if share < EARLY:
        tokens = f"{share:.0%} of its tokens, where speed-ups count"
        yield f"{baseline.label}: has its own final loss after {tokens}."


def _notes_across(runs: Sequence[Run]) -> Iterator[str]:
    """Differences between machines, commits and versions, and missing records."""
    if any(run.tokenizer_hash is None or run.content_hash is None for run in runs):
        consequence = "so the same corpus and tokenizer of all runs are not verified"
        yield f"A run did not record its data, {consequence}."
    launches: list[dict[str, Any]] = []
    for run in runs:
        launches += run.launches
    hardware = {hardware_label(launch) or "not recorded" for launch in launches}
    if len(hardware) > 1:
        names = "; ".join(sorted(hardware))
        yield f"Hardware differs, so the seconds of the runs do not compare ({names})."
    if len(set(map(commit_label, launches))) > 1:
        yield "The runs were made with different commits of the code."
    if any("+dirty" in (run.commit or "") for run in runs):
        consequence = "so its commit alone does not reproduce it"
        yield f"A run was made with uncommitted changes, {consequence}."
    if len(records(runs, "versions")) > 1:
        yield "The runs were made with different versions of python or its packages."


def obstacle_to_comparison(group: Group, baseline: Group) -> str:
    """Why the losses of a group cannot be compared with the baseline's, in two words.

    "" if they can.
    """
    if _is_measured_apart(group, baseline):
        return "validated differently"
    if has_other_tokenizer(group, baseline):
        obstacle = obstacle_across_tokenizers(group, baseline)
        if obstacle:
            return obstacle
    return "baseline unfinished" if baseline.unfinished else ""


def _is_measured_apart(group: Group, baseline: Group) -> bool:
    """Whether the losses of two groups are on different texts or different tokens.

    The tokens of two tokenizers always differ, and their text is compared elsewhere.
    """
    settings = _task(group)
    baseline_settings = _task(baseline)
    keys = differing([settings, baseline_settings])
    is_across_tokenizers = has_other_tokenizer(group, baseline)
    if is_across_tokenizers:
        keys = [key for key in keys if schema_key(key) not in FOLLOWS_TOKENIZER]
    if any(changes_measure(key) for key in keys) or _unknown_data(group, baseline):
        return True
    if is_across_tokenizers:
        return False
    has_contents = CONTENT in settings and CONTENT in baseline_settings
    return CONTENT in keys and has_contents


def _unknown_data(group: Group, baseline: Group) -> str:
    """The class of user-made data without a fingerprint, if settings of the data differ.

    "" if the data are known, or the runs have the same settings of them.
    """
    keys = differing([_task(group), _task(baseline)])
    data_keys = [key for key in keys if key.startswith("data.")]
    if not any(setting_of(key).role in (CORPUS, VALIDATION, PATHS) for key in data_keys):
        return ""
    for run in (group.counted[0], baseline.counted[0]):
        own_class = mapping(run.record.get("data")).get("class")
        if own_class and run.content_hash is None:
            return str(own_class)
    return ""


def _task(group: Group) -> dict[str, Any]:
    """Settings of texts, training and validation, which a comparison should have in common.

    A `val_context_length` that is null, or that an older commit did not record, has the number that
    it stands for.
    """
    settings = {key: value for key, value in group.settings.items() if _is_task(key)}
    length = block_length(group.runs[0])
    if length is not None:
        settings["data.init_args.val_context_length"] = length
    return settings


def _is_task(key: str) -> bool:
    return setting_of(key).role not in (MODEL, TUNING)


def _tuning(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.settings.items() if setting_of(key).role is TUNING}


def _model(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.settings.items() if _is_of_network(key)}


def _is_of_network(key: str) -> bool:
    """Whether a setting is of the network, and not its class, which every label shows."""
    return setting_of(key).role is MODEL and key != "model.class_path"


def _is_apart(values: Sequence[float], share: float) -> bool:
    """Whether values differ by more than a share of the largest."""
    return bool(values) and max(values) - min(values) > share * max(values)
