"""A small study with `anneal`, and stand-ins for its trained runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy import stats

from anlit.study.estimate import merge_configuration
from anlit.study.plan import Study
from anlit.study.report import write_report
from anlit.study.results import plan_runs, read_results
from tests.compare.conftest import write_run
from tests.compare.reports import geometric_t_interval
from tests.study.conftest import UNTUNED_ARMS, changed_study, first_points, shared_with
from tests.study.reports import Page, with_interval

LENGTHS = [100, 200, 400, 800]
TOKENS_PER_STEP = 8 * 256
SEEDS = (1, 2, 3)
CONSTANT = {"class_path": "anlit.Constant", "init_args": {"warmup": 0.1}}
CHANGES = {
    "arms": UNTUNED_ARMS,
    "shared": shared_with({"model.init_args.schedule": CONSTANT}),
    "anneal": {"max_steps": LENGTHS, "decay": 0.2},
    "sections": ["annealed", "convergence"],
}


def annealed_study(folder: Path, **changes: Any) -> Study:
    return changed_study(folder, **CHANGES | changes)


def law(tokens: float, speedup: float, seed: int) -> float:
    """A loss that falls as a power of tokens: a line in the logarithms."""
    scale = 20 * (1 + 0.01 * seed)
    return scale * (speedup * tokens) ** -0.15


SPEEDUPS = {("angpt", 1): 1.3, ("angpt", 2): 1.4, ("angpt", 3): 1.35}


def train(study: Study, output: Path, falling: float = 0.0) -> None:
    """Write all runs. A stable run is 0.2 nats above the law.

    The speed-up is `SPEEDUPS` at 100 steps, and has the factor `falling_factor` for twice the
    steps.
    """
    points = first_points(study)
    for run in plan_runs(study, points):
        seed = run.seed.shown["seed"]
        peak_speedup = SPEEDUPS.get((run.arm.name, seed), 1.0)
        n_steps = run.settings["trainer.max_steps"]
        losses = {}
        for step in range(20, n_steps + 1, 20):
            if step > run.n_inherited:
                tokens = step * TOKENS_PER_STEP
                losses[tokens] = 0.2 + law(tokens, peak_speedup, seed)
        if run.n_inherited:
            speedup = peak_speedup
            if run.arm.name == "angpt":
                speedup *= falling_factor(falling, seed) ** math.log2(n_steps / 100)
            tokens = n_steps * TOKENS_PER_STEP
            losses[tokens] = law(tokens, speedup, seed)
        record = {"parameters": 10_000}
        write_run(output / run.name, merge_configuration(run), record, losses)


def falling_factor(falling: float, seed: int) -> float:
    """The factor for twice the steps, 2^-falling, a little different for each seed."""
    of_seed = falling * (1 + 0.1 * (seed - 2))
    return 2.0**-of_seed


def report(study: Study) -> Page:
    return Page(write_report(read_results(study, Path("out"))).with_suffix(".md"))


def geometric_mean(values: Sequence[float]) -> str:
    """`1.35 (1.31 … 1.39)`: the mean and the t-interval of the logarithms."""
    low, high = geometric_t_interval(values)
    return with_interval(".2f", stats.gmean(values), low, high)
