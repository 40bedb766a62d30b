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
    inner = Path(name).as_posix().removeprefix("configs/")
    # An absolute path, or one with "..", would lead out of the folder.
    if not Path(name).is_absolute() and ".." not in Path(name).parts and (FOLDER / inner).is_file():
        return str(FOLDER / inner)
    if Path(name).is_dir():
        raise UserError(f"{option} {name} is a folder: give a YAML file")
    known = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
    close = difflib.get_close_matches(inner, known, n=1, cutoff=0.75)
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
    files: list[str] = []
    options: list[str] = []
    classes: list[str] = []
    while rest:
        argument = rest.pop(0)
        flag, equals, name = argument.partition("=")
        if flag not in ("-c", "--config") or not (equals or rest):
            options.append(argument)
            if flag in ("--model", "--data") and (equals or rest):
                classes.append(f"{flag}={name or rest[0]}")
        else:
            name = name if equals else rest.pop(0)
            files.append(f"--config={configuration_file(name)}")
    return [command, *(classes if files else []), *files, *options]
