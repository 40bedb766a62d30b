"""Labels that tell groups of runs apart."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECTIONS = ("model", "data", "trainer")
MOST_SETTINGS = 4
"""Settings in a label; where more are needed to tell groups apart, the run's folder takes their place."""
LONGEST = 40
"""Characters of one setting in a label; a longer one is cut."""
SPELLED = {"DynamicNTK": "dynamic NTK", "PRoPE": "p-RoPE", "NoPE": "no positions"}
"""Names of classes in labels, if they differ."""


def unique_labels(
    names: Sequence[str], settings: Sequence[dict[str, Any]], folders: Sequence[Path]
) -> list[str]:
    """A label for each group, no two alike.

    Args:
        names: What the group is called by architecture and attention; several may have the same.
        settings: The group's settings by dotted key.
        folders: The folder of one of its runs.
    """
    labels = list(names)
    for name in dict.fromkeys(names):
        members = [index for index, other in enumerate(names) if other == name]
        words = _words([settings[index] for index in members])
        for index, details in zip(members, words, strict=True):
            labels[index] = ", ".join([name, *details])
    counts = Counter(labels)
    shortest = _short_folders(folders)
    return [
        label if counts[label] == 1 else f"{name}, {folder}"
        for label, name, folder in zip(labels, names, shortest, strict=True)
    ]


def _words(settings: list[dict[str, Any]]) -> list[list[str]]:
    """For groups of one name: the settings that tell them apart, then others that differ, in words.

    None if more are needed than a label has room for.
    """
    needed = distinguishing(settings)
    if len(needed) > MOST_SETTINGS:
        return [[] for _ in settings]
    differing_keys = differing(settings)
    others = [key for key in differing_keys if key not in needed]
    shown = needed + others[: MOST_SETTINGS - len(needed)]
    names = short_names(list(dict.fromkeys([*needed, *differing_keys])))
    is_cut = len(others) > MOST_SETTINGS - len(needed)
    labels = []
    for group in settings:
        words = [_word(group, key, names[key]) for key in _in_order(shown) if _applies(group, key)]
        labels.append([*words, "…"] if is_cut else words)
    return labels


def _word(group: dict[str, Any], key: str, name: str) -> str:
    text = show(group, key)
    word = text if _is_class(group.get(key)) else f"{name}={text}"
    return word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"


def _applies(group: dict[str, Any], key: str) -> bool:
    """Whether the group has this setting: an argument of a class that it does not use is no word about it."""
    if group.get(key) is not None:
        return True
    owner, separator, _ = key.rpartition(".init_args.")
    return not separator or any(other.startswith(f"{owner}.init_args.") for other in group)


def distinguishing(settings: list[dict[str, Any]]) -> list[str]:
    """Few keys whose values together differ between any two groups, as far as any do; found greedily."""
    candidates = _differing_keys(settings)
    chosen: list[str] = []
    n_apart = 1
    while n_apart < len(settings):
        best = max(
            candidates, key=lambda key: _count_distinct(settings, [*chosen, key]), default=None
        )
        if best is None or _count_distinct(settings, [*chosen, best]) == n_apart:
            break
        chosen.append(best)
        n_apart = _count_distinct(settings, chosen)
    return _in_order(chosen)


def _count_distinct(settings: list[dict[str, Any]], keys: list[str]) -> int:
    return len({tuple(show(group, key) for key in keys) for group in settings})


def differing(settings: list[dict[str, Any]]) -> list[str]:
    """Keys whose values differ, those of the model first. If a class differs, its arguments are left out."""
    keys = _differing_keys(settings)
    classes = [key for key in keys if key.endswith("class_path")]
    arguments = tuple(key.removesuffix("class_path") + "init_args." for key in classes)
    return [key for key in keys if not key.startswith(arguments)]


def _differing_keys(settings: list[dict[str, Any]]) -> list[str]:
    all_keys = {key: None for group in settings for key in group}
    keys = [key for key in all_keys if len({repr(group.get(key)) for group in settings}) > 1]
    return _in_order(keys)


def _in_order(keys: list[str]) -> list[str]:
    """Keys of the model, then of the data, then of the Trainer, then others; each by the alphabet."""

    def place(key: str) -> tuple[int, str]:
        section = key.partition(".")[0]
        return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS), key

    return sorted(keys, key=place)


def short_names(keys: list[str]) -> dict[str, str]:
    """The shortest ending of each dotted key that no other key has: `lr`, `positions`."""
    parts = {
        key: [part for part in key.split(".") if part not in ("init_args", "class_path")]
        for key in keys
    }
    endings: Counter[tuple[str, ...]] = Counter()
    for words in parts.values():
        endings.update(tuple(words[-n:]) for n in range(1, len(words) + 1))
    names = {}
    for key, words in parts.items():
        unique = [n for n in range(1, len(words)) if endings[tuple(words[-n:])] == 1]
        length = unique[0] if unique else len(words)
        names[key] = ".".join(words[-length:])
    return names


def show(settings: dict[str, Any], key: str) -> str:
    """A setting's value in a label: no module path, no trailing zeros."""
    value: Any = settings.get(key)
    if _is_class(value):
        name = value.rsplit(".", 1)[-1]
        return SPELLED.get(name, name)
    if value is None:  # the null rate of model/*.yaml follows from the width
        return "default" if ".init_args." in key else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("anlit.")


def _short_folders(folders: Sequence[Path]) -> list[str]:
    """Each folder's name, with as many of its parents as it takes to have it once."""
    depth = 1
    paths = [folder.absolute().parts for folder in folders]
    names = ["/".join(path[-depth:]) for path in paths]
    while len({*names}) < len({*paths}):
        depth += 1
        names = ["/".join(path[-depth:]) for path in paths]
    return names
