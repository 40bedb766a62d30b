"""Times training steps of finished runs' configurations in turns, to compare their wall-clock.

`anlit compare --measure_steps` and `anlit study` call it. It builds each run's model again from
config.yaml. Optimizer, precision, clipping, accumulation, runtime settings, batch size and threads
are the run's. The tokens are random. The models take steps in turns, round by round. So other
programs slow all of them alike. The rounds end when every ratio of times is known to `PRECISION`.
They end after `SECONDS_PER_MODEL` for each model at the latest.
"""

import gc
import os
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import torch

import anlit.nn.mechanisms
import anlit.training.models  # noqa: F401  classes that a configuration may name
from anlit.benchmarks.harness import LONGEST_REASON, Ready
from anlit.benchmarks.timing import (
    Results,
    Seconds,
    alternate,
    clocks,
    paired_ratio,
    summarize_times,
)
from anlit.benchmarks.training_step import (
    prepare_trainer,
    random_batches,
    stop_learning,
    take_step,
)
from anlit.compare.comparison import STEPS
from anlit.config.labels import CONFIG, class_path, init_args, mapping
from anlit.config.objects import build_from_plain, is_plain, subclass_named
from anlit.errors import UserError, first_line
from anlit.io.provenance import environment
from anlit.io.write import write_json
from anlit.nn.models.runtime import flush_denormals
from anlit.reporting.text import echo
from anlit.runs.folders import Run
from anlit.runs.groups import Group
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import device_name, find_device

UNCOUNTED_ROUNDS = 2
"""Rounds that do not count."""
MIN_ROUNDS = 15
"""Rounds that count, at least."""
MAX_ROUNDS = 1000
"""Rounds that count, at most."""
SECONDS_PER_MODEL = 30.0
"""The longest duration, for each model."""
PRECISION = 0.02
"""The interval of a ratio of times may be this share wide to both sides."""


def time_steps(groups: list[Group], folder: Path) -> None:
    """Time steps of every configuration in turns, and write `STEPS` into `folder`.

    Raises:
        UserError: A model cannot be built, or its step fails.
    """
    flush_denormals()  # before torch starts its threads
    device = find_device("auto")
    record = environment()
    record["command"] = shlex.join(["anlit", *sys.argv[1:]])
    echo(f"Timing steps of {len(groups)} configurations in turns …")
    try:
        record |= _measure(groups, device)
    except UserError:
        raise
    except Exception as error:  # kernels and compilers raise many classes
        reason = first_line(error)[:LONGEST_REASON]
        raise UserError(
            f"the steps of the runs could not be timed ({reason}): leave out --measure_steps"
        ) from error
    finally:
        gc.collect()  # the command may need the GPU again
        torch.cuda.empty_cache()
    record["hardware"] |= {"threads": torch.get_num_threads(), "devices": [device_name(device)]}
    record["waiting"] = os.environ.get("OMP_WAIT_POLICY")
    write_json(folder / STEPS, record)


def _measure(groups: list[Group], device: torch.device) -> dict[str, Any]:
    """Time the configurations.

    Returns:
        `arms`: the run, key, tokens of a step, `seconds_per_token` of each round, and whether they
        are steady. `clocks` of a GPU.
    """
    runs = [group.counted[0] for group in groups]
    _set_common_threads(runs)
    arms: list[dict[str, Any]] = []
    turns = {}
    for number, (group, run) in enumerate(zip(groups, runs, strict=True)):
        step, tokens = build_step(run, device)
        step()  # allocates, and compiles if the run does
        turns[number] = Ready({"step": step}).of_steps(device).make_turn(device)
        arms.append({"run": str(run.folder), "key": group.key, "tokens": tokens})

    limit = SECONDS_PER_MODEL * len(turns)
    deadline = time.monotonic() + limit
    alternate(turns, UNCOUNTED_ROUNDS)
    results = alternate(turns, MAX_ROUNDS, deadline, are_precise)
    for number, arm in enumerate(arms):
        times = _step_seconds(results[number])
        arm["seconds_per_token"] = [value / arm["tokens"] for value in times]
        arm["steady"] = summarize_times(times)["steady"]
    return {"arms": arms, "clocks": clocks(device)}


def _set_common_threads(runs: Sequence[Run]) -> None:
    """Set the runs' number of processor threads if all recorded the same number."""
    numbers = {threads_of(run) for run in runs}
    numbers.discard(None)
    if len(numbers) == 1:
        torch.set_num_threads(numbers.pop() or 1)


def build_step(run: Run, device: torch.device) -> tuple[partial[Any], int]:
    """Return a function that takes a step of the run's configuration, and the tokens of a step."""
    batch_size = init_args(run.config.get("data")).get("batch_size")
    if not isinstance(batch_size, int):
        raise UserError(f"{run.folder / CONFIG} gives no data.batch_size: leave the run out")
    trainer, accumulate = prepare_run(run, device)
    model: Any = trainer.lightning_module
    shape = (batch_size, model.context_length)
    has_documents = model.model.document_masking
    (batch,) = random_batches(model.vocab_size, shape, has_documents, device, n_batches=1)
    tokens = accumulate * batch_size * model.context_length
    return partial(take_step, trainer, batch, accumulate), tokens


def _step_seconds(rounds: Sequence[Seconds]) -> list[float]:
    return [seconds["step"] for seconds in rounds]


def are_precise(results: Results[int, Seconds]) -> bool:
    """Return whether every ratio of times is known to `PRECISION`."""
    times = [_step_seconds(rounds) for rounds in results.values()]
    if len(times[0]) < MIN_ROUNDS:
        return False
    for arm_times, other_times in combinations(times, 2):
        ratio = paired_ratio(arm_times, other_times)
        widest = max(ratio.high / ratio.median, ratio.median / ratio.low)
        if not widest <= 1 + PRECISION:
            return False
    return True


def threads_of(run: Run) -> int | None:
    """Return the processor threads of the run's last launch, None if it did not record them."""
    if not run.launches:
        return None
    threads = mapping(run.launches[-1].get("hardware")).get("threads")
    return threads if isinstance(threads, int) else None


def prepare_run(run: Run, device: torch.device) -> tuple[L.Trainer, int]:
    """Return a Trainer that is ready to take the run's steps, and the micro-batches of a step.

    Its learning rate is 0.

    Raises:
        UserError: The model cannot be built.
    """
    settings = mapping(run.config.get("trainer"))
    clip = settings.get("gradient_clip_val")
    try:
        model = build_model(run)
        trainer = prepare_trainer(model, device, settings.get("precision") or "32-true", clip)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{run.folder / CONFIG}: model cannot be built ({error}): leave the run out"
        ) from error
    stop_learning(trainer)
    return trainer, settings.get("accumulate_grad_batches") or 1


def build_model(run: Run) -> LanguageModel:
    """Build the model and the optimizer of a run's config.yaml, and no other object of it.

    Raises:
        UserError: The file names no model or optimizer, or gives a wrong setting.
        TypeError, ValueError: A setting is missing, or the class refuses it.
    """
    key = f"{run.folder / CONFIG}: model"
    section = mapping(run.config.get("model"))
    settings = dict(init_args(section))
    optimizer = settings.pop("optimizer", None)
    kind = subclass_named(LanguageModel, class_path(section), key)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules among the hyperparameters
        model = build_from_plain(kind, settings, key)
    if optimizer is not None:
        model.make_optimizer = optimizer_maker(optimizer, f"{key}.optimizer")
    return model


def optimizer_maker(spec: Any, key: str) -> partial[torch.optim.Optimizer]:
    """Return the function that makes the optimizer of a configuration."""
    kind = subclass_named(torch.optim.Optimizer, class_path(spec), key)
    arguments = init_args(spec)
    if not is_plain(arguments):
        raise UserError(f"{key} has settings that are neither numbers nor texts: leave the run out")
    return partial(kind, **arguments)
