"""Finds the configuration files that anlit ships.

Their names are those in `configs/`: `model/angpt.yaml`, from any folder.
"""

import difflib
from pathlib import Path

from anlit.errors import UserError

_PACKAGE = Path(__file__).parents[1]
_IN_WHEEL = _PACKAGE / "configs"
_IN_CLONE = _PACKAGE.parent / "configs"
FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE
"""The folder `configs/`."""


def configuration_file(name: str, option: str = "--config") -> str:
    """The path of a configuration file: the local file of that name, else the shipped file.

    The name of a shipped file may begin with `configs/`. Raises UserError, which names the option,
    if there is no such file.
    """
    if Path(name).is_file():
        return name
    if Path(name).is_dir():
        raise UserError(f"{option} {name} is a folder: give a YAML file")
    if Path(name).exists():
        raise UserError(f"{option} {name} is not a regular file: save it, and give its path")
    shipped = {}
    for path in FOLDER.rglob("*.yaml"):
        shipped[path.relative_to(FOLDER).as_posix()] = str(path)
    shipped_name = Path(name).as_posix().removeprefix("configs/")
    if shipped_name in shipped:
        return shipped[shipped_name]
    near = difflib.get_close_matches(shipped_name, shipped, n=1, cutoff=0.75)
    near = near or sorted(path for path in shipped if Path(path).name == Path(name).name)
    fix = "check the path, or give a shipped file such as model/angpt.yaml"
    if near:
        fix = f"did you mean {' or '.join(near)}?"
    raise UserError(
        f"{option} {name} does not exist, here or among the files that anlit ships: {fix}"
    )
