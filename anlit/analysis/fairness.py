"""Whether a comparison is fair: refuses those without meaning, and notes what a reader must know."""

from collections import Counter
from typing import Any

from anlit.errors import UserError
from anlit.runs.folders import Run, commit_label, hardware_label
from anlit.runs.groups import Group, differing, records, short_names, show

# Settings of the model that belong to the task rather than to the model.
TASK = ("context_length", "vocab_size")
PARAMETERS_APART = 0.05
TOKENS_APART = 0.01


def refuse_other_tokenizers(groups: list[Group]) -> None:
    """Nats per token mean nothing across tokenizers.

    Raises:
        UserError: two runs recorded different tokenizers.
    """
    folders: dict[str, Run] = {}
    for group in groups:
        for run in group.counted:
            if run.tokenizer_hash:
                folders.setdefault(run.tokenizer_hash, run)
    if len(folders) > 1:
        (hash_1, run_1), (hash_2, run_2) = list(folders.items())[:2]
        raise UserError(
            f"{run_1.folder} and {run_2.folder} were trained with different tokenizers ({hash_1[:12]}, {hash_2[:12]}), "
            "whose losses per token cannot be compared: give only runs that share a tokenizer."
        )


def notes(groups: list[Group], baseline: Group) -> list[str]:
    """One sentence for each difference that makes a comparison with `baseline` less fair."""
    told = []
    for group in groups:
        told += _within(group)
        if group is not baseline:
            told += _against(group, baseline)
    return told + _across(groups)


def state_notes(groups: list[Group], runs: list[Run]) -> list[str]:
    """One sentence for each group whose numbers do not come from all its runs, or from unfinished ones."""
    notes = []
    for group in groups:
        states = Counter(run.state for run in group.runs if run not in group.counted)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        share = f"{len(group.counted)} of {len(group.runs)} runs"
        if not group.counted:
            notes.append(f"{group.label}: not counted, because none of its runs can be compared ({told}).")
        elif told:
            notes.append(f"{group.label}: {share} are counted; left out: {told}.")
        if group.counted and group.unfinished:
            notes.append(f"{group.label}: UNFINISHED, its final loss is the last one so far.")
    unread = [str(run.folder) for run in runs if not run.config]
    return notes + [f"{folder}: not counted, because it has no config.yaml." for folder in unread]


def _within(group: Group) -> list[str]:
    notes = []
    seeds = Counter(run.seed for run in group.counted)
    twice = [str(seed) for seed, count in seeds.items() if count > 1]
    if twice:
        notes.append(f"{group.label}: seed {', '.join(twice)} occurs more than once, so its runs are not independent.")
    tokens = [float(run.curve.tokens[-1]) for run in group.counted]
    if _apart(tokens, TOKENS_APART):
        notes.append(f"{group.label}: its runs ended after different numbers of tokens.")
    if any(run.status == "unknown" for run in group.counted):
        notes.append(f"{group.label}: a run has no recorded status; it is taken as finished.")
    return notes


def _against(group: Group, baseline: Group) -> list[str]:
    notes = []
    ours, theirs = _task(group), _task(baseline)
    names = short_names(differing([ours, theirs]))
    for key in names:
        kind = "validated differently" if "val" in key.rsplit(".", 1)[-1] else "trained differently"
        kind = "other data" if key in ("data.content", "data.tokenizer") else kind
        values = f"{show(ours.get(key))}, the baseline {show(theirs.get(key))}"
        notes.append(f"{group.label}: {kind}: {names[key]} is {values}.")
    tokens = [float(g.counted[0].curve.tokens[-1]) for g in (group, baseline)]
    if not group.unfinished and _apart(tokens, TOKENS_APART):
        budget = f"{tokens[0]:,.0f} training tokens, the baseline {tokens[1]:,.0f}"
        notes.append(f"{group.label}: {budget}; a schedule of another length changes every point of a curve.")
    sizes = [float(g.counted[0].parameters or 0) for g in (group, baseline)]
    if all(sizes) and _apart(sizes, PARAMETERS_APART):
        notes.append(f"{group.label}: {sizes[0]:,.0f} parameters, the baseline {sizes[1]:,.0f}.")
    return notes


def _across(groups: list[Group]) -> list[str]:
    runs = [run for group in groups for run in group.counted]
    notes = []
    if any(run.tokenizer_hash is None or run.content_hash is None for run in runs):
        notes.append("A run did not record its data, so the same corpus and tokenizer of all runs are not verified.")
    launches = [launch for run in runs for launch in run.launches]
    if len({hardware_label(launch) for launch in launches}) > 1:
        machines = Counter(run.hardware or "not recorded" for run in runs)
        counts = "; ".join(f"{name}: {count} runs" for name, count in machines.items())
        notes.append(f"Hardware differs, so the seconds of the runs do not compare ({counts}).")
    if len({commit_label(launch) for launch in launches}) > 1:
        notes.append("The runs were made with different commits of the code.")
    if any("+dirty" in (run.commit or "") for run in runs):
        notes.append("A run was made with uncommitted changes, so its commit alone does not reproduce it.")
    if len(records(tuple(runs), "versions")) > 1:
        notes.append("The runs were made with different versions of python or its packages.")
    return notes


def _task(group: Group) -> dict[str, Any]:
    """Settings that define what is learned and measured, as opposed to the model that learns it."""
    return {
        key: value
        for key, value in group.settings.items()
        if key.startswith(("data.", "trainer.")) or (key.startswith("model.") and key.rsplit(".", 1)[-1] in TASK)
    }


def _apart(values: list[float], share: float) -> bool:
    return max(values) - min(values) > share * max(values)
