"""Runs tasks on checkpoints, with one model in memory at a time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anlit.checkpoints.loading import Checkpoint, describe, device_name, load_checkpoint
from anlit.errors import UserError
from anlit.evaluation.record import header
from anlit.evaluation.sequence_lengths import require_at_least
from anlit.inference.text import text_of

BOOTSTRAP = 1000
"""Resamplings for the standard errors of metrics that have no formula, such as perplexity."""


@dataclass(frozen=True)
class Settings:
    """What to evaluate and how.

    Args:
        tasks: Names of lm_eval's tasks and groups, or YAML files that define one.
        include_path: Folders with the user's task files.
        shots: Examples before each question; None for the task's number.
        limit: Questions of each task; None for all.
        batch_size: Sequences in a batch; it does not change the results.
        length: The most tokens that the model reads; None for its training length.
        tokenizer: A tokenizer.json; None for that of the model's data.
        device: A torch device, or auto.

    Raises:
        UserError: A number is out of range, or there is no task.
    """

    tasks: tuple[str, ...]
    include_path: tuple[str, ...] = ()
    shots: int | None = None
    limit: int | None = None
    batch_size: int = 32
    length: int | None = None
    tokenizer: str | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("--tasks names no task: give names such as arc_easy,piqa or a task's YAML file")
        require_at_least(1, limit=self.limit, batch_size=self.batch_size, length=self.length)
        require_at_least(0, shots=self.shots)


@dataclass(frozen=True)
class Metric:
    """One number of one task."""

    task: str
    name: str
    """Such as acc, followed by a comma and lm_eval's filter if there is one."""
    value: float
    error: float | None
    """Standard error; None if lm_eval has none."""


def evaluate_all(paths: Sequence[str], settings: Settings, command: str) -> tuple[list[list[Metric]], dict[str, Any]]:
    """The metrics of each checkpoint, and the record with all that lm_eval returned.

    Raises:
        UserError: lm_eval is not installed; a checkpoint, its tokenizer or a setting is wrong; a task is unknown or its
            data is not available.
    """
    manager = task_manager(settings)
    record = header(command, [])
    metrics: list[list[Metric]] = []
    for path in paths:
        checkpoint = load_checkpoint(path, settings.device)
        results = evaluate(checkpoint, settings, manager)
        metrics.append(list(metrics_of(results["results"])))
        record["checkpoints"].append(describe(checkpoint))
        record.setdefault("results", []).append(_plain(results))
        record["device"] = device_name(checkpoint.device)
    record |= {"settings": asdict(settings), "lm_eval": version("lm_eval")}
    return metrics, record


def evaluate(checkpoint: Checkpoint, settings: Settings, manager: Any) -> dict[str, Any]:
    """What lm_eval's `simple_evaluate` returns for one checkpoint."""
    from lm_eval import simple_evaluate

    from anlit.evaluation.harness.model import HarnessModel

    text = text_of(checkpoint, settings.tokenizer)
    model = HarnessModel(checkpoint, text, settings.batch_size, settings.length or checkpoint.training_length)
    try:
        return simple_evaluate(
            model,
            tasks=list(settings.tasks),
            num_fewshot=settings.shots,
            limit=settings.limit,
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    except (FileNotFoundError, ConnectionError) as error:  # raised by the library `datasets` for missing data
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the data of a task in {','.join(settings.tasks)} is not available ({reason}): go online once, or name "
            "task files with local data with --include_path"
        ) from error


def task_manager(settings: Settings) -> Any:
    """lm_eval's index of tasks, or only of those in `include_path` if these are enough.

    Raises:
        UserError: lm_eval is not installed, or a task is unknown.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError("anlit evaluate needs lm_eval: run `make extras EXTRAS=eval`") from error
    for folder in settings.include_path:
        if not Path(folder).is_dir():
            raise UserError(f"--include_path {folder} is not a folder: give one with task files of lm_eval")
    names = [task for task in settings.tasks if not Path(task).is_file()]
    folders: list[str | Path] = list(settings.include_path)
    if folders:
        included = TaskManager(include_path=folders, include_defaults=False)
        if len(names) == len(settings.tasks) and set(names) <= set(included.all_subtasks):
            return included  # indexing the 14,000 that lm_eval ships takes seconds
    manager = TaskManager(include_path=folders or None)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise UserError(
            f"lm_eval has no task {', '.join(unknown)}: `lm-eval ls tasks` lists them; give your own files with "
            "--include_path"
        )
    return manager


def metrics_of(results: dict[str, dict[str, Any]]) -> list[Metric]:
    """Every number in lm_eval's results with its standard error. The filter `none` is left out of the name."""
    found = []
    for task, values in results.items():
        for key, value in values.items():
            name, _, chosen = key.partition(",")
            if not isinstance(value, int | float) or not chosen or name.endswith("_stderr"):
                continue
            error = values.get(f"{name}_stderr,{chosen}")
            shown = name if chosen == "none" else f"{name},{chosen}"
            found.append(Metric(task, shown, float(value), error if isinstance(error, float) else None))
    return found


def _plain(results: dict[str, Any]) -> dict[str, Any]:
    """The parts of lm_eval's results that are numbers and names."""
    return {key: results[key] for key in ("results", "versions", "n-shot", "n-samples") if key in results}
