"""`anlit benchmark fit`: steps of a real run beside bare steps of its configuration, in turns.

A round is a short `anlit fit` with the typed arguments. Then follow bare steps. These
have the same model, optimizer, precision and accumulation, on batches of the run's data. They lack
the loader, callbacks and logging. The same clock times both, on a GPU the device's. Each counts
with its median step, the run with its second half.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device

import anlit.data.corpora
import anlit.data.mixture
import anlit.data.needle  # noqa: F401  classes that a configuration may name
from anlit.benchmarks.harness import Benchmark
from anlit.benchmarks.options import benchmark_parser, parse
from anlit.benchmarks.run_steps import prepare_run, threads_of
from anlit.benchmarks.training_step import take_step
from anlit.config.labels import CONFIG, class_path, init_args, mapping
from anlit.config.objects import build_from_plain, subclass_named
from anlit.config.options import ToolParser, at_least
from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.io.metrics_csv import parse_cell, read_rows
from anlit.reporting.text import echo, say
from anlit.runs.folders import METRICS, Run, load_run
from anlit.training.callbacks.throughput import StepTimes

N_BATCHES = 8
"""Batches of the run that bare steps take in turns."""
STEPS_BETWEEN_LOGS = 10


class BareSteps:
    """The steps of a run's configuration, without loader, callbacks and logging."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.trainer, self.accumulate = prepare_run(run, device)
        self.batches = cycle(islice(training_batches(run, self.trainer, device), N_BATCHES))
        self.device = device

    def seconds(self, n_steps: int) -> float:
        """Return the median of `n_steps` steps, after as many steps of warm-up."""
        times = StepTimes(self.device)
        self.take_steps(n_steps, times)
        times.take()
        self.take_steps(n_steps, times)
        return median(times.take())

    def take_steps(self, n_steps: int, times: StepTimes) -> None:
        for _ in range(n_steps):
            take_step(self.trainer, next(self.batches), self.accumulate)
            times.mark()


def training_batches(run: Run, trainer: L.Trainer, device: torch.device) -> Iterator[Batch]:
    """Yield the training batches of a run from its first, on the device."""
    key = f"{run.folder / CONFIG}: data"
    section = mapping(run.config.get("data"))
    if "class" in mapping(run.record.get("data")):
        raise UserError(
            f"{key} names a class that is not anlit's, whose batches are not made again: leave out "
            "--measure_steps"
        )
    kind = subclass_named(TokenShards, class_path(section), key)
    data = build_from_plain(kind, {**init_args(section), "num_workers": 0}, key)
    data.context_length = trainer.lightning_module.context_length  # type: ignore[assignment]
    data.setup("fit")
    for batch in data.train_dataloader():
        yield move_data_to_device(batch, device)


def run_fit(arguments: Sequence[str], folder: Path, n_steps: int, device: torch.device) -> Run:
    """Train on one device for `n_steps` into a new `folder`.

    By default a run takes all GPUs, and bare steps take one. UserError with the run's last line if
    it fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "run_dir": folder,
        "trainer.devices": f"[{device.index}]" if device.index else 1,
        "trainer.max_steps": n_steps,
        "trainer.log_every_n_steps": STEPS_BETWEEN_LOGS,
        "trainer.limit_val_batches": 0,
        "checkpoint_every_n_steps": n_steps,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "anlit", "fit", *arguments, *options]
    fit = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8"
    )
    if fit.returncode:
        lines = fit.stderr.splitlines() or ["no message"]
        typed = shlex.join(arguments)
        raise UserError(f"anlit fit {typed} fails ({lines[-1]}): correct its arguments")
    return load_run(folder)


def logged_times(run: Run) -> dict[str, float]:
    """Return median step and share of waiting for data in the second half of a run's log."""
    path = run.folder / METRICS
    rows = [row for row in read_rows(path) if row.get("train/step_seconds_p50")]
    late_rows = rows[len(rows) // 2 :]
    return {
        "fit": median(parse_cell(row, "train/step_seconds_p50", path) for row in late_rows),
        "data_wait_share": median(
            parse_cell(row, "train/data_wait_share", path) for row in late_rows
        ),
    }


def main(argv: list[str]) -> int:
    options = parse(fit_parser(), argv)
    benchmark = Benchmark("fit", argv, options)
    bare_steps: BareSteps | None = None
    rounds: list[dict[str, float]] = []
    for number_of_round in range(1, options.rounds + 1):
        folder = Path(options.output) / "run"
        run = run_fit(options.arguments, folder, options.steps, options.device)
        if bare_steps is None:
            bare_steps = make_bare_steps(run, options.device)
        times = logged_times(run)
        times["bare"] = bare_steps.seconds(max(1, options.steps // 2))
        times["ratio"] = times["fit"] / times["bare"]
        rounds.append(times)
        say(f"round {number_of_round}: {in_words(times)}")
        benchmark.save(rounds=rounds)
    benchmark.save(finished=True)
    medians = {}
    for name in rounds[0]:
        medians[name] = median([times[name] for times in rounds])
    echo(f"median of {len(rounds)}: {in_words(medians)}")
    return 0


def make_bare_steps(run: Run, device: torch.device) -> BareSteps:
    """Build the run's model with the run's threads, on the CPU if the run was on it."""
    threads = threads_of(run)
    if threads is not None:
        torch.set_num_threads(threads)
    was_on_cpu = mapping(run.config.get("trainer")).get("accelerator") == "cpu"
    return BareSteps(run, torch.device("cpu") if was_on_cpu else device)


def in_words(times: Mapping[str, float]) -> str:
    """Return `fit 1.02 ms a step, bare 1.01 ms, fit ÷ bare 1.010, 0.30% of it waiting for data`."""
    return (
        f"fit {1e3 * times['fit']:,.2f} ms a step, bare {1e3 * times['bare']:,.2f} ms, "
        f"fit ÷ bare {times['ratio']:.3f}, {times['data_wait_share']:.2%} of it waiting for data"
    )


def fit_parser() -> ToolParser:
    example = "-- --config experiment/demo/gpt.yaml --data.num_workers 2"
    parser = benchmark_parser("fit", __doc__, example)
    add = parser.add_argument
    steps = "optimizer steps of each run (%(default)s)"
    add("--steps", type=at_least(4 * STEPS_BETWEEN_LOGS), default=200, help=steps)
    add("arguments", nargs="+", metavar="ARGUMENT", help="of anlit fit, after --")
    parser.set_defaults(rounds=3)
    return parser
