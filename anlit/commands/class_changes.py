"""Names the settings of configuration files that later files or options drop.

A later file or option may choose another class for a key. The parser then drops the settings that
the new class lacks. It says nothing. An option may also replace the list of callbacks, to which
`callbacks+` would add.
"""

from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from anlit.commands.written_defaults import read_given_settings
from anlit.config.labels import as_list, class_name, init_args, mapping


def class_change_messages(config: Namespace) -> Iterator[str]:
    """Yield a sentence for each file and class with settings that a later class drops."""
    files = [str(file) for file in config.config or []]
    final = config.as_dict()
    contents = {file: read_given_settings(file, final) for file in files}
    for section in ("model", "data", "trainer"):
        for file, content in contents.items():
            for sentence in _dropped_settings(content.get(section), final.get(section), section):
                yield f"{file}: {sentence}"
    for file, content in contents.items():
        yield from _dropped_callbacks(file, content, final["trainer"])


def _dropped_settings(spec: Any, final_spec: Any, key: str) -> Iterator[str]:
    """Yield a sentence for each class at `key` or below it that lacks settings of `spec`.

    The final configuration has every setting of its classes.
    """
    settings = _settings_of(spec)
    final_settings = _settings_of(final_spec)
    final_class = class_name(final_spec)
    if final_class:
        dropped = [name for name in settings if name not in final_settings]
        if dropped:
            names = ", ".join(dropped)
            yield f"{names} left out, {final_class} has no such {key} settings."
    for name, value in settings.items():
        yield from _dropped_settings(value, final_settings.get(name), f"{key}.{name}")


def _dropped_callbacks(
    file: str, content: dict[str, Any], final_trainer: dict[str, Any]
) -> Iterator[str]:
    """Yield a sentence if the final configuration lacks callbacks of a file."""
    trainer = mapping(content.get("trainer"))
    names = [*_callbacks_of(trainer, "callbacks"), *_callbacks_of(trainer, "callbacks+")]
    final_names = _callbacks_of(final_trainer, "callbacks")
    dropped = [name for name in names if name not in final_names]
    if dropped:
        cause = "a later trainer.callbacks replaces the list, trainer.callbacks+ would add to it"
        yield f"{file}: {', '.join(dropped)} left out, {cause}."


def _callbacks_of(trainer: dict[str, Any], key: str) -> list[str]:
    """Return the names of the classes in a list of callbacks, or of a single one."""
    return list(filter(None, map(class_name, as_list(trainer.get(key)))))


def _settings_of(spec: Any) -> dict[str, Any]:
    """Return the settings of a configured class, or of a mapping without class."""
    values = mapping(spec)
    if "class_path" in values or "init_args" in values:
        return init_args(values)
    return values
