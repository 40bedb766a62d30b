"""Finds the data of a run from another folder than the one in which the run was started.

A run's config.yaml has paths as the user gave them, relative to that folder. A `run_dir` of
`runs/gpt` in /home/ann/runs/gpt/config.yaml tells that it is /home/ann.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anlit.config.labels import CONFIG, init_args, mapping
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


def message_on_move(run: Path, config: Mapping[str, Any]) -> str | None:
    """Return a sentence if a run was moved, and its prepared data are not found from here."""
    run_dir = config.get("run_dir")
    settings = init_args(config.get("data"))
    folders = {"data.path": settings.get("path")}
    for name, path in mapping(settings.get("paths")).items():
        folders[f"data.paths.{name}"] = path
    missing = {}
    for key, path in folders.items():
        if isinstance(path, str) and "://" not in path and not Path(path).exists():
            missing[key] = path
    if not run_dir or not missing or start_folder(run, run_dir) is not None:
        return None
    has_relative = not all(Path(path).is_absolute() for path in missing.values())
    fix = "start in the folder where it was trained, or give" if has_relative else "give"
    settings_missing = ", ".join(f"{key}={path}" for key, path in missing.items())
    return (
        f"{run} was moved or copied from {run_dir}, and {settings_missing} of its {CONFIG} is "
        f"not found from here: {fix} the data's present folder"
    )


def _from_start(path: Any, start: Path) -> Any:
    """Return `path` below `start`, if it exists only there; else as it is."""
    if not isinstance(path, str) or Path(path).exists() or not (start / path).exists():
        return path
    return str(start / path)
