"""Attention mechanisms by the names that a user gives on the command line."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from anlit.attention import mechanisms
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError
from anlit.shipped import configuration_file

D_HEAD = 64
"""[SI]'s head width; BetaScaling's exponent depends on it."""


def named(names: Iterable[str]) -> dict[str, Mechanism]:
    """The mechanisms, made for one head, by label: the class's name, or the name of a YAML file.

    Args:
        names: Class names in any case, made with default arguments, or YAML fragments (paths or shipped names) that set
            `model.init_args.attention`.

    Raises:
        UserError: One is neither, or cannot be made; or two have the same label.
    """
    found: dict[str, Mechanism] = {}
    for name in filter(None, map(str.strip, names)):
        is_file = name.endswith((".yaml", ".yml"))
        label, mechanism = (Path(name).stem, _of_file(name)) if is_file else _of_class(name)
        if label in found:
            raise UserError(f"--mechanisms names {label} twice: give each once, or rename one of the YAML files")
        found[label] = mechanism.for_layer(1, D_HEAD, 0)
    if not found:
        raise UserError(f"--mechanisms names none: choose among {', '.join(mechanisms.__all__)}, or a YAML fragment")
    return found


def _of_class(name: str) -> tuple[str, Mechanism]:
    classes = {known.casefold(): known for known in mechanisms.__all__}
    if name.casefold() not in classes:
        raise UserError(
            f"--mechanisms {name!r} is unknown: choose among {', '.join(mechanisms.__all__)}, or give a YAML fragment"
        )
    label = classes[name.casefold()]
    try:
        return label, getattr(mechanisms, label)()
    except TypeError as error:
        raise UserError(f"--mechanisms {label} needs arguments: describe it in a YAML fragment") from error


def _of_file(path: str) -> Mechanism:
    try:
        content = yaml.safe_load(Path(configuration_file(path, "--mechanisms")).read_text(encoding="utf-8"))
    except UserError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--mechanisms {path} cannot be read ({str(error).splitlines()[0]}): give a YAML file"
        ) from error
    try:
        made = _made(content["model"]["init_args"]["attention"])
    except (KeyError, TypeError, AttributeError, ImportError, ValueError) as error:
        raise UserError(
            f"--mechanisms {path} does not describe an attention mechanism ({error}): set model.init_args.attention "
            "to its class_path and init_args, as attention/log_n.yaml does"
        ) from error
    if not isinstance(made, Mechanism):
        raise UserError(f"--mechanisms {path} makes a {type(made).__name__}, which is no attention mechanism")
    return made


def _made(described: Any) -> Any:
    """The object that a class_path with init_args describes; arguments described so are made first."""
    if isinstance(described, list):
        return [_made(part) for part in described]
    if not isinstance(described, dict) or "class_path" not in described:
        return described
    module, _, name = described["class_path"].rpartition(".")
    arguments = {key: _made(value) for key, value in (described.get("init_args") or {}).items()}
    return getattr(import_module(module or "anlit"), name)(**arguments)
