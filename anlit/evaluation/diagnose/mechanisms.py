"""Attention mechanisms by their names on the command line."""

from collections.abc import Iterable
from pathlib import Path

import yaml

from anlit.attention import mechanisms
from anlit.attention.mechanism import Mechanism
from anlit.errors import UserError
from anlit.settings import build, subclass_named
from anlit.shipped import configuration_file

D_HEAD = 64
"""[SI]'s head width; BetaScaling's exponent depends on it."""


def named(names: Iterable[str]) -> dict[str, Mechanism]:
    """The mechanisms, made for one head, by label: the class's name, or the name of a YAML file.

    Args:
        names: Class names in any case, made with default arguments, or YAML fragments (paths or shipped names) that set
            `model.init_args.attention`.

    Raises:
        UserError: A name is unknown, a mechanism cannot be made, or two have the same label.
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
        described = content["model"]["init_args"]["attention"]
        return build(subclass_named(Mechanism, described["class_path"], path), described.get("init_args") or {}, path)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"--mechanisms {path} does not describe an attention mechanism ({error}): set model.init_args.attention "
            "to its class_path and init_args, as the files in configs/attention/ do"
        ) from error
