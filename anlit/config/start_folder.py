"""Finds the data of a run from another folder than the one in which the run was started.

A run's config.yaml has paths as the user gave them, relative to that folder. A `run_dir` of
`runs/gpt` in /home/ann/runs/gpt/config.yaml tells that it is /home/ann.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anlit.config.labels import init_args
from anlit.config.schema import PATHS, setting_of


def start_folder(run: Path, run_dir: Any) -> Path | None:
    """Return the folder in which the run in `run` was started; None if `run_dir` does not tell."""
    parts = Path(str(run_dir or "")).parts
    folder = run.resolve()
    if not parts or folder.parts[-len(parts) :] != parts:
        return None
    return Path(*folder.parts[: -len(parts)])


def data_paths_from_start(run: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's data that are found only from where it was started.

    Args:
        run: The run folder.
        config: Its configuration.

    Returns:
        Name → the same paths as absolute ones.
    """
    start = start_folder(run, config.get("run_dir"))
    if start is None:
        return {}
    found: dict[str, Any] = {}
    for name, value in init_args(config.get("data")).items():
        if name == "paths" and isinstance(value, Mapping):
            absolute: Any = {key: _from_start(path, start) for key, path in value.items()}
        elif setting_of(f"data.{name}").role is PATHS:
            absolute = _from_start(value, start)
        else:
            continue
        if absolute != value:
            found[name] = absolute
    return found


def _from_start(path: Any, start: Path) -> Any:
    """Return `path` below `start`, if it exists only there; else as it is."""
    if not isinstance(path, str) or Path(path).exists() or not (start / path).exists():
        return path
    return str(start / path)
