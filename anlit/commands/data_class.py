"""Finds and checks the class of the data in a command."""

from collections.abc import Sequence
from pydoc import locate
from typing import Any

import lightning as L

import anlit
from anlit.config.imports import DOTTED_PATH, import_failure, path_problem
from anlit.config.labels import class_path
from anlit.errors import UserError

USUAL_CLASS = "TokenShards"
"""The class of settings of `data` that name none."""


def data_class_options(
    option: str | None, contents: Sequence[dict[str, Any]], options: Sequence[str]
) -> list[str]:
    """Return options that name the usual class of data, if settings of data name no class.

    Args:
        option: The value of `--data`.
        contents: The contents of the configuration files.
        options: The further options of the command.

    Raises:
        UserError: The named class cannot be imported, or is not a LightningDataModule.
    """
    sections = [content["data"] for content in contents if content.get("data")]
    paths = [option] if option is not None else []
    for section in reversed(sections):
        path = class_path(section)
        if path:
            paths.append(path)
    asks_help = any(text.startswith("--data.help") for text in options)
    values = [text.rpartition("=")[2] for text in options] if asks_help else []
    for name in (*paths, *values):
        getattr(anlit, name, None)  # imports it: the parser finds bare names of imported classes
    if paths:
        _check_class(paths[0])
        return []
    has_settings = any(text.startswith("--data.") for text in options)
    return [f"--data={USUAL_CLASS}"] if (sections or has_settings) and not asks_help else []


def _check_class(path: str) -> None:
    """Raise UserError if a dotted path leads to no LightningDataModule.

    The parser looks for bare names, and explains files and lists of settings.
    """
    if not DOTTED_PATH.fullmatch(path):
        return
    failure = import_failure(path)
    if failure:
        raise UserError(
            f"data names {path}, and {failure}: correct the module, or give one of this folder or "
            "of an installed package"
        )
    problem = path_problem(path)
    if problem:
        raise UserError(f"data names {path}, and {problem}: give a class that it has")
    found = locate(path)
    if isinstance(found, type) and issubclass(found, L.LightningDataModule):
        return
    raise UserError(
        f"data names {path}, which is not a LightningDataModule: derive it from lightning's"
    )
