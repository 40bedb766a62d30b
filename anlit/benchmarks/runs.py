"""Times training steps of the configurations of finished runs, in turns, to compare their wall-clock.

`anlit compare --measure_steps` and `anlit study` call it. It builds each run's model again from config.yaml, with the
optimizer, precision, clipping, accumulation, runtime settings, batch size and threads of the run, on random tokens. All
models take steps one after another and round by round, so that other work of the machine slows all of them alike. It
goes on until every ratio of times is known to `PRECISION`, or for `SECONDS` for each model.
"""

import gc
import os
import shlex
import sys
import time
import warnings
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning as L
import torch

import anlit.nn.mechanisms
import anlit.training.models  # noqa: F401  classes that a configuration may name
from anlit.benchmarks.harness import Ready, first_line
from anlit.benchmarks.options import Size
from anlit.benchmarks.timing import Seconds, alternate, clocks, paired_ratio, quartiles, warm_up
from anlit.benchmarks.training_step import batch_of, take_step, trainer_of
from anlit.compare.comparison import STEPS
from anlit.config.labels import CONFIG, init_args, mapping
from anlit.config.objects import build_from_plain, is_plain, subclass_named
from anlit.errors import UserError
from anlit.io.provenance import environment
from anlit.io.write import write_json
from anlit.nn.models.runtime import flush_denormals
from anlit.reporting.text import echo
from anlit.runs.folders import Run
from anlit.runs.groups import Group
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import device_name, find_device

FEWEST, MOST, WARMUP = 15, 1000, 2
"""Rounds that count, and those before them."""
SECONDS = 30.0
"""The longest that it may take, for each model."""
PRECISION = 0.02
"""The interval of a ratio of times may be this share wide to both sides."""


def time_steps(groups: list[Group], folder: Path) -> None:
    """Time steps of every group's configuration in turns and write `STEPS` into `folder`; UserError where one fails."""
    flush_denormals()  # before torch starts its threads
    device, record = find_device("auto"), environment()
    echo(f"Timing steps of {len(groups)} configurations in turns …")
    try:
        record |= {"command": shlex.join(["anlit", *sys.argv[1:]]), **_measure(groups, device)}
    except UserError:
        raise
    except Exception as error:  # kernels and compilers have exceptions of their own
        why = f"the steps of the runs could not be timed ({first_line(error)}): leave out --measure_steps"
        raise UserError(why) from error
    finally:
        gc.collect()  # what follows may need the GPU
        torch.cuda.empty_cache()
    record["hardware"] |= {"threads": torch.get_num_threads(), "devices": [device_name(device)]}
    write_json(folder / STEPS, record | {"waiting": os.environ.get("OMP_WAIT_POLICY")})


def _measure(groups: list[Group], device: torch.device) -> dict[str, Any]:
    """`arms`: {run, key, tokens, seconds_per_token of each round, steady or not}; `clocks` of a GPU."""
    runs = [group.counted[0] for group in groups]
    threads = {threads_of(run) for run in runs} - {None}
    if len(threads) == 1:
        torch.set_num_threads(threads.pop() or 1)
    turns, arms = {}, list[dict[str, Any]]()
    for number, (group, run) in enumerate(zip(groups, runs, strict=True)):
        rows = init_args(run.config.get("data")).get("batch_size")
        if not isinstance(rows, int):
            raise UserError(f"{run.folder / CONFIG} gives no data.batch_size: leave the run out")
        trainer, accumulate = trainer_of_run(run, device)
        model: Any = trainer.lightning_module
        size = Size(0, 0, 0, model.vocab_size, model.context_length, rows, "")
        step = partial(
            take_step, trainer, batch_of(size, model.model.document_masking, device), accumulate
        )
        step()  # allocations, and compilation where there is one
        turns[number] = Ready({"step": step}).turn(device)
        arms.append(
            {
                "run": str(run.folder),
                "key": group.key,
                "tokens": accumulate * rows * model.context_length,
            }
        )

    def precise(so_far: dict[int, list[Seconds]]) -> bool:
        values = [[turn["step"] for turn in so_far[number]] for number in so_far]
        ratios = (paired_ratio(mine, others) for mine, others in combinations(values, 2))
        return len(values[0]) >= FEWEST and all(
            max(ratio.high / ratio.median, ratio.median / ratio.low) <= 1 + PRECISION
            for ratio in ratios
        )

    limit = SECONDS * len(turns)
    deadline = time.monotonic() + limit
    if device.type == "cuda":
        warm_up(turns, deadline - limit / 2)
    alternate(turns, WARMUP)
    results = alternate(turns, MOST, deadline, precise)
    for number, arm in enumerate(arms):
        seconds = [turn["step"] for turn in results[number]]
        arm["seconds_per_token"] = [value / arm["tokens"] for value in seconds]
        arm["steady"] = quartiles(seconds)["steady"]
    return {"arms": arms, "clocks": clocks(device)}


def threads_of(run: Run) -> int | None:
    """Processor threads of the run's last launch; None if it did not record them."""
    launches = run.launches
    threads = mapping(launches[-1].get("hardware")).get("threads") if launches else None
    return threads if isinstance(threads, int) else None


def trainer_of_run(run: Run, device: torch.device) -> tuple[L.Trainer, int]:
    """A Trainer that has prepared the model of a run to take its steps, and the micro-batches of a step.

    UserError if the model cannot be built.
    """
    settings = mapping(run.config.get("trainer"))
    clip = settings.get("gradient_clip_val")
    try:
        model = model_of(run)
        trainer = trainer_of(model, device, settings.get("precision") or "32-true", clip)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{run.folder / CONFIG}: model cannot be built ({error}): leave the run out"
        ) from error
    return trainer, settings.get("accumulate_grad_batches") or 1


def model_of(run: Run) -> LanguageModel:
    """The model of a run's config.yaml, with new weights and the run's optimizer. No other object of the file is made.

    UserError if it names no model or no optimizer, or one with a setting that is none; TypeError or ValueError if a
    setting is missing, or refused by the class.
    """
    where = f"{run.folder / CONFIG}: model"
    settings = dict(init_args(run.config.get("model")))
    optimizer = settings.pop("optimizer", None)
    kind = subclass_named(
        LanguageModel, str(mapping(run.config.get("model")).get("class_path")), where
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules among the hyperparameters
        model = build_from_plain(kind, settings, where)
    if optimizer is not None:
        path = optimizer if isinstance(optimizer, str) else mapping(optimizer).get("class_path")
        maker = subclass_named(torch.optim.Optimizer, str(path), f"{where}.optimizer")
        if not is_plain(arguments := init_args(optimizer)):
            raise UserError(
                f"{where}.optimizer has settings that are no numbers or texts: leave the run out"
            )
        model.make_optimizer = partial(maker, **arguments)
    return model
