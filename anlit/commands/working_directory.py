"""Lets a command import a user's modules from the working directory, as `python FILE` does."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class WorkingDirectoryFinder(MetaPathFinder):
    """Finds a module that no installed package has, in a file or package of a folder.

    A folder without `__init__.py` is no package: results and data have names such as `wandb`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # inside of a package
            return None
        spec = PathFinder.find_spec(fullname, [self.folder])
        if spec is None or spec.loader is None:
            return None
        if self.folder not in sys.path:  # for child processes that import it again
            sys.path.append(self.folder)
        return spec


def import_from_working_directory() -> None:
    """Let imports of this process look into the working directory last."""
    folder = os.getcwd()
    for finder in sys.meta_path:
        if isinstance(finder, WorkingDirectoryFinder) and finder.folder == folder:
            return
    sys.meta_path.append(WorkingDirectoryFinder(folder))
