"""Labels that tell groups of runs apart."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECTIONS = ("model", "data", "trainer")
"""The order of settings in a label."""
MOST_SETTINGS = 4
"""Settings in a label; where more are needed, the run's folder takes their place."""
LONGEST = 40
"""Characters of one setting in a label; a longer setting is cut."""
HASHES = ("data.content", "data.tokenizer")
"""Settings that are hashes, which a label shows only if no other setting tells groups apart."""
SEPARATORS = r"._+=\-"
"""Characters between the words of a run's name, as in a regular expression."""
WORDS = re.compile(rf"[^{SEPARATORS}]+|[{SEPARATORS}]+")
"""A word of a name, or what is between two words."""
SPELLED = {"DynamicNTK": "dynamic NTK", "PRoPE": "p-RoPE", "NoPE": "no positions"}
"""Classes whose names in labels differ from the class name."""
NULL_VALUES = {
    "trainer.precision": "32-true",
    "model.init_args.attention.class_path": "Plain",
}
"""What null stands for, in settings whose null is as clear as a value."""


def unique_labels(
    names: Sequence[str], settings: Sequence[dict[str, Any]], folders: Sequence[Path]
) -> list[str]:
    """A label for each group, no two alike.

    Args:
        names: The groups by the name of their runs, or by architecture and attention. Several may
            have the same name.
        settings: The group's settings by dotted key.
        folders: The folder of one of its runs.
    """
    labels = list(names)
    for name in dict.fromkeys(names):
        members = [index for index, other_name in enumerate(names) if other_name == name]
        details = _settings_in_words([settings[index] for index in members])
        for index, detail in zip(members, details, strict=True):
            labels[index] = ", ".join([name, *detail])
    counts = Counter(labels)
    paths = [folder.absolute() for folder in folders]
    for index, path in enumerate(paths):
        if counts[labels[index]] > 1:
            labels[index] = f"{names[index]}, {path.relative_to(os.path.commonpath(paths))}"
    return labels


def common_name(names: Sequence[str]) -> str:
    """The name that runs share whose names may end in their seeds. "" if they share none.

    `gpt-wide` for `gpt-wide-s1` and `gpt-wide-s2`: the words that all names begin with.
    """
    words_of_names = [WORDS.findall(name) for name in names]
    shared = ""
    for words in zip(*words_of_names, strict=False):
        if len(set(words)) > 1:
            break
        shared += words[0]
    return names[0] if len(set(names)) == 1 else re.sub(rf"[{SEPARATORS}]+$", "", shared)


def _settings_in_words(groups: list[dict[str, Any]]) -> list[list[str]]:
    """For groups of one name: the settings that tell them apart, then further settings that differ.

    No words if more settings are needed than a label has room for.
    """
    necessary = distinguishing(groups)
    if len(necessary) > MOST_SETTINGS:
        return [[] for _ in groups]
    differing_keys = differing(groups)
    further = [key for key in differing_keys if key not in (*necessary, *HASHES)]
    room = MOST_SETTINGS - len(necessary)
    keys = _in_order(necessary + further[:room])
    names = short_names(list(dict.fromkeys([*necessary, *differing_keys])))
    labels = []
    for group in groups:
        applying = [key for key in keys if _applies(group, key)]
        texts = [_setting_in_words(group, key, names[key]) for key in applying]
        if len(further) > room:
            texts.append("…")
        labels.append(texts)
    return labels


def _setting_in_words(group: dict[str, Any], key: str, name: str) -> str:
    text = show(group, key)
    if not _is_class(group.get(key)):
        text = f"{name}={text}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _applies(group: dict[str, Any], key: str) -> bool:
    """Whether a group has this setting.

    Labels leave out the arguments of a class that the group does not use.
    """
    if group.get(key) is not None:
        return True
    owner, separator, _ = key.rpartition(".init_args.")
    return not separator or any(name.startswith(f"{owner}.init_args.") for name in group)


def distinguishing(groups: list[dict[str, Any]]) -> list[str]:
    """Few keys with values that differ between any two groups, if any do.

    They are found greedily.
    """
    candidates = _differing_keys(groups)
    chosen: list[str] = []
    n_distinct = 1
    while n_distinct < len(groups) and candidates:
        counts = {key: _count_distinct(groups, [*chosen, key]) for key in candidates}
        best = max(candidates, key=lambda key: counts[key])
        if counts[best] == n_distinct:
            break
        chosen.append(best)
        n_distinct = counts[best]
    return _in_order(chosen)


def _count_distinct(groups: list[dict[str, Any]], keys: list[str]) -> int:
    values = set()
    for group in groups:
        values.add(tuple(show(group, key) for key in keys))
    return len(values)


def differing(groups: list[dict[str, Any]]) -> list[str]:
    """Keys with different values, keys of the model first.

    If a class differs, its arguments are left out.
    """
    return without_arguments(_differing_keys(groups))


def without_arguments(keys: list[str]) -> list[str]:
    """Keys without the arguments of a class that is among the keys itself."""
    classes = [key for key in keys if key.endswith("class_path")]
    arguments = tuple(key.removesuffix("class_path") + "init_args." for key in classes)
    return [key for key in keys if not key.startswith(arguments)]


def _differing_keys(groups: list[dict[str, Any]]) -> list[str]:
    keys: dict[str, None] = {}
    for group in groups:
        keys |= dict.fromkeys(group)
    return _in_order([key for key in keys if _count_values(groups, key) > 1])


def _count_values(groups: list[dict[str, Any]], key: str) -> int:
    return len({repr(group.get(key)) for group in groups})


def _in_order(keys: list[str]) -> list[str]:
    """Keys in the order of `SECTIONS`, then of no section; each by the alphabet."""

    def rank(key: str) -> tuple[int, str]:
        section = key.partition(".")[0]
        return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS), key

    return sorted(keys, key=rank)


def short_names(keys: list[str]) -> dict[str, str]:
    """The shortest ending of each dotted key that no other key has: `lr`, `positions`."""
    counts: Counter[str] = Counter()
    for key in keys:
        counts.update(_endings(key))
    names = {}
    for key in keys:
        unique = [ending for ending in _endings(key) if counts[ending] == 1]
        names[key] = unique[0] if unique else _endings(key)[-1]
    return names


def _endings(key: str) -> list[str]:
    """The last component of a key, the last two, … without `init_args` and `class_path`."""
    components = [name for name in key.split(".") if name not in ("init_args", "class_path")]
    components = components or [key]
    return [".".join(components[first:]) for first in reversed(range(len(components)))]


def show(settings: dict[str, Any], key: str) -> str:
    """A setting's value in a label: no module path, no trailing zeros."""
    value: Any = settings.get(key)
    if _is_class(value):
        name = value.rsplit(".", 1)[-1]
        return SPELLED.get(name, name)
    if value is None and key in NULL_VALUES:
        return NULL_VALUES[key]
    if value is None:  # the null rate of model/*.yaml follows from the width
        return "default" if ".init_args." in key else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("anlit.")
