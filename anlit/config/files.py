"""The configuration files that anlit ships, found by their name in `configs/`: `model/angpt.yaml`, from any folder."""

import difflib
from pathlib import Path

from anlit.errors import UserError

_PACKAGE = Path(__file__).parents[1]
FOLDER = next(
    folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()
)
"""`configs/`, which is inside the package in a wheel, and next to the package in a clone."""


def configuration_file(name: str, option: str = "--config") -> str:
    """The path of a configuration file: the local file of that name, else the shipped one, with or without `configs/`.

    Raises UserError, which names the option, if there is no such file.
    """
    if Path(name).is_file():
        return name
    if Path(name).is_dir():
        raise UserError(f"{option} {name} is a folder: give a YAML file")
    shipped = {path.relative_to(FOLDER).as_posix(): str(path) for path in FOLDER.rglob("*.yaml")}
    inner = Path(name).as_posix().removeprefix("configs/")
    if inner in shipped:
        return shipped[inner]
    close = difflib.get_close_matches(inner, shipped, n=1, cutoff=0.75)
    advice = (
        f"did you mean {close[0]}?"
        if close
        else "check the path, or give a shipped one such as model/angpt.yaml"
    )
    raise UserError(
        f"{option} {name} does not exist, here or among the files that anlit ships: {advice}"
    )
