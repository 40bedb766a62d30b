"""Which callbacks of a configuration may change what a run learns.

The class attribute `changes_learning` says it for callbacks of anlit. A user's own callback may.
"""

from functools import cache
from pathlib import Path
from typing import Any

from anlit.config.labels import as_list, class_name, class_path, init_args
from anlit.config.registry import class_constants

PACKAGE = Path(__file__).parents[1]
CALLBACKS = (*PACKAGE.glob("training/callbacks/*.py"), PACKAGE / "evaluation" / "samples.py")
"""The files of anlit's callbacks. Their source is read, because an import would load torch."""
ON = "on"
"""The value of a callback in labels; a run without the callback has `none`."""
LIGHTNING = "lightning.pytorch.callbacks."
OBSERVERS = (
    "lightning.pytorch.callbacks.Checkpoint",
    "lightning.pytorch.callbacks.DeviceStatsMonitor",
    "lightning.pytorch.callbacks.LearningRateMonitor",
    "lightning.pytorch.callbacks.ModelCheckpoint",
    "lightning.pytorch.callbacks.ModelSummary",
    "lightning.pytorch.callbacks.OnExceptionCheckpoint",
    "lightning.pytorch.callbacks.ProgressBar",
    "lightning.pytorch.callbacks.RichModelSummary",
    "lightning.pytorch.callbacks.RichProgressBar",
    "lightning.pytorch.callbacks.SpikeDetection",
    "lightning.pytorch.callbacks.ThroughputMonitor",
    "lightning.pytorch.callbacks.Timer",
    "lightning.pytorch.callbacks.TQDMProgressBar",
)
"""Lightning's callbacks that change nothing of what is learned."""


def learning_callbacks(callbacks: Any) -> dict[str, Any]:
    """The callbacks that may change what is learned, by class name, as settings of a run.

    Each has `on` for its class and its arguments, so labels and notes name what differs.
    """
    settings: dict[str, Any] = {}
    for spec in as_list(callbacks):
        if spec and changes_learning(class_path(spec)):
            name = class_name(spec)
            n_alike = sum(key.partition(" ")[0] == name for key in settings)
            key = f"{name} {n_alike + 1}" if n_alike else name
            settings[key] = {"class_path": ON, "init_args": _arguments(spec)}
    return settings


def changes_learning(path: str) -> bool:
    """Whether a callback, by its class path, may change what is learned."""
    name = path.rpartition(".")[2]
    if path.startswith("anlit."):
        return _own_callbacks().get(name) is not False
    if path.startswith(LIGHTNING):
        return f"{LIGHTNING}{name}" not in OBSERVERS  # also for the path of the class's own file
    return True


@cache
def _own_callbacks() -> dict[str, Any]:
    return class_constants(CALLBACKS, "changes_learning")


def _arguments(spec: Any) -> dict[str, Any]:
    """The arguments of a callback; a mapping such as a schedule is one value."""
    arguments = {}
    for key, value in init_args(spec).items():
        arguments[key] = str(value) if isinstance(value, dict) else value
    return arguments
