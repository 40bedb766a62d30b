"""Expands the arguments of `anlit fit | validate | test` before LightningCLI's parser reads them.

`--config` gets the path of its file, `validate RUN` the options of that run, ~ the home folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anlit.checkpoints.location import CHECKPOINTS
from anlit.commands.data_class import data_class_options
from anlit.config.files import configuration_file
from anlit.config.labels import CONFIG, class_path
from anlit.config.options import ToolParser, expand_home
from anlit.errors import UserError
from anlit.io.read import read_yaml

CONFIGURATION_SCHEMA = dict.fromkeys(("trainer", "model", "data"), (dict, str))
"""Schema of a configuration file for `read_yaml`. The parser checks everything below these keys."""
CLASS_OPTIONS = ("model", "data")
"""Options that name a class, and have its settings below them."""


def expand_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of a subcommand, with the path of the file that each `--config` names.

    The files come first, so that an option wins over a file wherever it stands. The classes of
    `--model` and `--data` precede the files. A file may set arguments of such a class.
    Raises UserError if a file is missing or damaged.
    """
    command, *options = expand_run_folder([_expand_home(argument) for argument in arguments])
    parser = ToolParser(prog=f"anlit {command}", add_help=False)
    parser.add_argument("-c", "--config", action="append", default=[])
    for name in CLASS_OPTIONS:
        parser.add_argument(f"--{name}")
    parsed, further_options = parser.parse_known_args(options)

    class_options = []
    for name in CLASS_OPTIONS:
        path = getattr(parsed, name)
        if path is not None:
            class_options.append(f"--{name}={path}")
    files = [configuration_file(name) for name in parsed.config]
    contents = [read_yaml(file, CONFIGURATION_SCHEMA) for file in files]
    _refuse_studies(parsed.config, contents)
    class_options += data_class_options(parsed.data, contents, further_options)
    if not files:
        return [command, *class_options, *further_options]
    return [
        command,
        *classes_of_later_files(contents),
        *class_options,
        *(f"--config={file}" for file in files),
        *class_options,
        *further_options,
    ]


def _refuse_studies(names: list[str], contents: list[dict[str, Any]]) -> None:
    for name, content in zip(names, contents, strict=True):
        if "arms" in content:
            raise UserError(
                f"--config {name} is the plan of a study, which trains a run for each of its arms: "
                f"give it to anlit study --config {name}"
            )


def classes_of_later_files(contents: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the class of model or data as an option where the first file with settings lacks it.

    The parser refuses or loses settings that precede their class.
    """
    for section in CLASS_OPTIONS:
        specs = [content[section] for content in contents if content.get(section)]
        class_paths = [class_path(spec) for spec in specs]
        named_paths = list(filter(None, class_paths))
        if named_paths and not class_paths[0]:
            yield f"--{section}={named_paths[0]}"


def expand_run_folder(arguments: list[str]) -> list[str]:
    """Return `validate RUN` as options: the run's configuration, and the checkpoint if RUN is one.

    Raises UserError if RUN is not in a run folder.
    """
    command, *options = arguments
    if command == "fit" or not options or options[0].startswith("-"):
        return arguments
    path = Path(options[0])
    is_checkpoint = CHECKPOINTS in path.parts[:-1]
    if is_checkpoint:
        folder = Path(*path.parts[: path.parts.index(CHECKPOINTS)])
    else:
        folder = path.parent if path.is_file() else path
    if not (folder / CONFIG).is_file():
        fix = "give a run folder such as runs/gpt-seed1, or --config FILE and --ckpt_path FILE"
        raise UserError(f"{path} is not a run folder with a {CONFIG}: {fix}")
    checkpoint_options = [f"--ckpt_path={path}"] if is_checkpoint else []
    return [command, f"--config={folder / CONFIG}", *checkpoint_options, *options[1:]]


def _expand_home(argument: str) -> str:
    """Replace ~ by the home folder, also in `--run_dir=~/runs`, which shells do not expand."""
    option, is_option, value = argument.partition("=")
    if is_option and argument.startswith("-"):
        return f"{option}={expand_home(value)}"
    return str(expand_home(argument))
