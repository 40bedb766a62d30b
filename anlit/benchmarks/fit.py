"""`anlit benchmark fit`: steps of a real run beside the bare steps of `benchmark step`, in turns.

A round is a short `anlit fit` with the given arguments, in a process of its own, and then bare steps of its
configuration: the same model, optimizer, precision and accumulation on batches of the run's own data, without loader,
callbacks and logging. Both are timed by the same clock, the device's on a GPU. Of each the median step counts, of the
run in its second half.
"""

import argparse
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import lightning as L
import torch
from torch import Tensor

import anlit.data.corpora
import anlit.data.mixture
import anlit.data.needle  # noqa: F401  classes that a configuration may name
from anlit.benchmarks.harness import Benchmark
from anlit.benchmarks.options import parse, parser_of
from anlit.benchmarks.runs import threads_of, trainer_of_run
from anlit.benchmarks.training_step import take_step
from anlit.config.labels import CONFIG, init_args, mapping
from anlit.config.objects import build_from_plain, subclass_named
from anlit.config.options import ToolParser, at_least
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.reporting.table import Table, console
from anlit.reporting.text import say
from anlit.runs.folders import METRICS, Run, load_run, number, read_rows
from anlit.training.callbacks.throughput import StepTimes

BATCHES = 8
"""Of the run's own, which bare steps take in turns."""
STEPS_BETWEEN_LOGS = 10


class BareSteps:
    """The steps of a run's configuration, without what a run does around them."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.trainer, self.accumulate = trainer_of_run(run, device)
        self.batches = cycle(islice(batches_of(run, self.trainer, device), BATCHES))
        self.device = device

    def seconds(self, n_steps: int) -> float:
        """The median of `n_steps` steps, after as many to warm up."""
        times = StepTimes(self.device)
        for _ in range(2):
            times.take()
            for _ in range(n_steps):
                take_step(self.trainer, next(self.batches), self.accumulate)
                times.mark()
        return median(times.take())


def batches_of(run: Run, trainer: L.Trainer, device: torch.device) -> Iterator[Batch]:
    """The training batches of a run from its first, on the device."""
    where = f"{run.folder / CONFIG}: data"
    section = mapping(run.config.get("data"))
    kind = subclass_named(TokenShards, str(section.get("class_path")), where)
    settings = {**init_args(section), "num_workers": 0}
    data = build_from_plain(kind, settings, where)
    data.context_length = trainer.lightning_module.context_length  # type: ignore[assignment]
    data.setup("fit")
    for batch in data.train_dataloader():
        moved = (part.to(device) if isinstance(part, Tensor) else part for part in batch)
        yield Batch(*moved)  # type: ignore[arg-type]


def run_fit(arguments: Sequence[str], folder: Path, n_steps: int) -> Run:
    """Train for `n_steps` into `folder`, which is made anew. UserError with what the run says where it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "run_dir": folder,
        "trainer.max_steps": n_steps,
        "trainer.log_every_n_steps": STEPS_BETWEEN_LOGS,
        "trainer.limit_val_batches": 0,
        "checkpoint_every_n_steps": n_steps,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "anlit", "fit", *arguments, *options]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.splitlines() or ["no message"])[-1]
        raise UserError(f"anlit fit {shlex.join(arguments)} fails ({last}): correct its arguments")
    return load_run(folder)


def recorded(run: Run) -> dict[str, float]:
    """Median step and share of waiting for data in the second half of a run, as it logged them."""
    path = run.folder / METRICS
    rows = [row for row in read_rows(path) if row.get("train/step_seconds_p50")]
    late = rows[len(rows) // 2 :]
    seconds = median(number(row, "train/step_seconds_p50", path) for row in late)
    waiting = median(number(row, "train/data_wait_share", path) for row in late)
    return {"fit": seconds, "data_wait_share": waiting}


def main(argv: list[str]) -> int:
    given = options(argv)
    benchmark = Benchmark("fit", argv, given)
    bare: BareSteps | None = None
    rounds: list[dict[str, float]] = []
    for turn in range(given.rounds):
        run = run_fit(given.arguments, Path(given.output) / "run", given.steps)
        if bare is None:
            on_cpu = mapping(run.config.get("trainer")).get("accelerator") == "cpu"
            torch.set_num_threads(threads_of(run) or torch.get_num_threads())
            bare = BareSteps(run, torch.device("cpu") if on_cpu else given.device)
        times = recorded(run) | {"bare": bare.seconds(max(1, given.steps // 2))}
        rounds.append(times | {"ratio": times["fit"] / times["bare"]})
        say(f"round {turn + 1}: fit {times['fit']:.4f} s, bare {times['bare']:.4f} s")
        benchmark.keep(rounds=rounds)
    benchmark.keep(finished=True)
    console().print(table_of(rounds))
    return 0


def table_of(rounds: Sequence[dict[str, float]]) -> Table:
    """A row for each round, and their medians."""
    body = [[str(turn), *cells(times)] for turn, times in enumerate(rounds, 1)]
    if len(rounds) > 1:
        names = rounds[0]
        middle = {name: median(times[name] for times in rounds) for name in names}
        body.append(["median", *cells(middle)])
    head = ["round", "fit, ms a step", "bare, ms a step", "fit ÷ bare", "waits for data"]
    return Table("Steps of a run and bare steps", head, body)


def cells(times: dict[str, float]) -> list[str]:
    waiting = times["data_wait_share"]
    return [
        f"{1e3 * times['fit']:.4g}",
        f"{1e3 * times['bare']:.4g}",
        f"{times['ratio']:.3f}",
        "" if math.isnan(waiting) else f"{waiting:.2%}",
    ]


def parser() -> ToolParser:
    parser = parser_of("fit", __doc__, "-- --config experiment/demo/gpt.yaml --data.num_workers 2")
    add = parser.add_argument
    most = "optimizer steps of each run"
    add("--steps", type=at_least(4 * STEPS_BETWEEN_LOGS), default=200, help=f"{most} (%(default)s)")
    add("arguments", nargs="+", metavar="ARGUMENT", help="of anlit fit, after --")
    parser.set_defaults(rounds=3)
    return parser


def options(argv: list[str]) -> argparse.Namespace:
    """The options and the arguments of `anlit fit`, which follow --."""
    return parse(parser(), argv)
