"""Is a comparison fair? Refuses comparisons without meaning, and notes what a reader must know."""

from collections import Counter, defaultdict
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
        (one, first), (two, second) = list(folders.items())[:2]
        raise UserError(
            f"{first.folder} and {second.folder} were trained with different tokenizers "
            f"({one[:12]}, {two[:12]}), whose losses per token cannot be compared: "
            "give only runs that share a tokenizer."
        )


def notes(groups: list[Group], baseline: Group) -> list[str]:
    """One sentence for each difference that makes a comparison with `baseline` less fair."""
    found = []
    for group in groups:
        found += _within(group)
        if group is not baseline:
            found += _against(group, baseline)
    return found + _across(groups)


def state_notes(groups: list[Group], runs: list[Run]) -> list[str]:
    """One sentence for each group whose numbers do not come from all its runs, or from unfinished ones."""
    found = []
    for group in groups:
        states = Counter(run.state for run in group.runs if run not in group.counted)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        share = f"{len(group.counted)} of {len(group.runs)} runs"
        if not group.counted:
            found.append(f"{group.label}: not counted, because none of its runs can be compared ({told}).")
        elif told:
            found.append(f"{group.label}: {share} are counted; left out: {told}.")
        if group.counted and group.unfinished:
            found.append(f"{group.label}: UNFINISHED, its final loss is the last one so far.")
    unread = [str(run.folder) for run in runs if not run.config]
    return found + [f"{folder}: not counted, because it has no config.yaml." for folder in unread]


def _within(group: Group) -> list[str]:
    found = []
    seeds = Counter(run.seed for run in group.counted)
    twice = [str(seed) for seed, count in seeds.items() if count > 1]
    if twice:
        found.append(f"{group.label}: seed {', '.join(twice)} occurs more than once, so its runs are not independent.")
    tokens = [float(run.curve.tokens[-1]) for run in group.counted]
    if _apart(tokens, TOKENS_APART):
        found.append(f"{group.label}: its runs ended after different numbers of tokens.")
    if any(run.status == "unknown" for run in group.counted):
        found.append(f"{group.label}: a run has no recorded status; it is taken as finished.")
    return found


def _against(group: Group, baseline: Group) -> list[str]:
    found = []
    ours, theirs = _task(group), _task(baseline)
    keys = differing([ours, theirs])
    names = short_names(keys)
    for key in keys:
        kind = "validated differently" if "val" in key.rsplit(".", 1)[-1] else "trained differently"
        kind = "other data" if key in ("data.content", "data.tokenizer") else kind
        values = f"{show(ours.get(key))}, the baseline {show(theirs.get(key))}"
        found.append(f"{group.label}: {kind}: {names[key]} is {values}.")
    tokens = [float(g.counted[0].curve.tokens[-1]) for g in (group, baseline)]
    if not group.unfinished and _apart(tokens, TOKENS_APART):
        budget = f"{tokens[0]:,.0f} training tokens, the baseline {tokens[1]:,.0f}"
        found.append(f"{group.label}: {budget}; a schedule of another length changes every point of a curve.")
    sizes = [float(g.counted[0].parameters or 0) for g in (group, baseline)]
    if all(sizes) and _apart(sizes, PARAMETERS_APART):
        found.append(f"{group.label}: {sizes[0]:,.0f} parameters, the baseline {sizes[1]:,.0f}.")
    return found


def _across(groups: list[Group]) -> list[str]:
    runs = [run for group in groups for run in group.counted]
    found = []
    if any(run.tokenizer_hash is None or run.content_hash is None for run in runs):
        found.append("A run did not record its data, so the same corpus and tokenizer of all runs are not verified.")
    launches = [launch for run in runs for launch in run.launches]
    if len({hardware_label(launch) for launch in launches}) > 1:
        told = defaultdict(list)
        for run in runs:
            told[run.hardware or "not recorded"].append(run)
        counts = "; ".join(f"{name}: {len(of)} runs" for name, of in told.items())
        found.append(f"Hardware differs, so the seconds of the runs do not compare ({counts}).")
    if len({commit_label(launch) for launch in launches}) > 1:
        found.append("The runs were made with different commits of the code.")
    if any("+dirty" in (run.commit or "") for run in runs):
        found.append("A run was made with uncommitted changes, so its commit alone does not reproduce it.")
    if len(records(tuple(runs), "versions")) > 1:
        found.append("The runs were made with different versions of python or its packages.")
    return found


def _task(group: Group) -> dict[str, Any]:
    """Settings that define what is learned and measured, as opposed to the model that learns it."""
    return {
        key: value
        for key, value in group.settings.items()
        if key.startswith(("data.", "trainer.")) or (key.startswith("model.") and key.rsplit(".", 1)[-1] in TASK)
    }


def _apart(values: list[float], share: float) -> bool:
    return max(values) - min(values) > share * max(values)
