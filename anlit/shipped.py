"""The configuration files that anlit ships, found by their name in `configs/`: `model/angpt.yaml`, from any folder."""

import difflib
from pathlib import Path

from anlit.errors import UserError

_PACKAGE = Path(__file__).parent
FOLDER = next(folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir())
"""`configs/`, which is inside the package in a wheel, and next to the package in a clone."""


def configuration_file(name: str, option: str = "--config") -> str:
    """The path of a configuration file: the local file of that name, else the shipped one.

    Args:
        name: A path, or the name of a shipped file such as `model/angpt.yaml`; `configs/model/angpt.yaml` is the same.
        option: The option that has the name, for the message.

    Raises:
        UserError: There is no such file.
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
    advice = f"did you mean {close[0]}?" if close else "check the path, or give a shipped one such as model/angpt.yaml"
    raise UserError(f"{option} {name} does not exist, here or among the files that anlit ships: {advice}")


def with_configuration_files(arguments: list[str]) -> list[str]:
    """The arguments of `anlit fit`, with the path of the file that each `--config` means.

    The files come first after the subcommand, in their order, so that an option wins over a file wherever it stands.
    Before them come the classes of model and data that options name, because a file may set arguments of such a class.

    Raises:
        UserError: One of the files does not exist.
    """
    command, *rest = arguments
    files, options, classes = list[str](), list[str](), list[str]()
    while rest:
        flag, equals, value = (argument := rest.pop(0)).partition("=")
        if flag in ("-c", "--config") and (equals or rest):
            files.append(f"--config={configuration_file(value if equals else rest.pop(0))}")
            continue
        options.append(argument)
        if flag in ("--model", "--data") and (equals or rest):
            classes.append(f"{flag}={value or rest[0]}")
    return [command, *(classes if files else []), *files, *options]
