"""`anlit sweep`: one `anlit fit` per point of a grid, a table of the final losses. Finished runs are kept."""

import argparse
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from anlit.analysis.runs import load_run
from anlit.errors import UserError


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its arm, the configuration files, and the settings given on the command line."""

    arm: str
    configs: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Folder name: the arm and the last part of each key with its value."""
        return "_".join([self.arm, *(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in self.settings)])

    def command(self, run_dir: Path) -> list[str]:
        """The `anlit fit` that makes this run, or continues it where it was cut."""
        files = [part for config in self.configs for part in ("--config", config)]
        options = [f"--{key}={value}" for key, value in self.settings]
        return [sys.executable, "-m", "anlit", "fit", *files, *options, f"--run_dir={run_dir}", "--ckpt_path=last"]


def read_points(path: str) -> list[Point]:
    """The runs that a sweep file lists: for every arm each grid's product, duplicates once.

    Raises:
        UserError: The file is missing, or an arm lacks `configs` or `grids`.
    """
    if not Path(path).is_file():
        raise UserError(f"the sweep file {path} does not exist: give one such as configs/study/demo.yaml")
    content = yaml.safe_load(Path(path).read_text())
    points: dict[str, Point] = {}
    for arm, spec in content["arms"].items():
        if not {"configs", "grids"} <= set(spec):
            raise UserError(f"arm '{arm}' of {path} needs the keys 'configs' and 'grids'")
        for grid in spec["grids"]:
            values = [value if isinstance(value, list) else [value] for value in grid.values()]
            for combination in itertools.product(*values):
                settings = tuple(sorted(zip(grid, combination, strict=True)))
                point = Point(arm, tuple(spec["configs"]), settings)
                points.setdefault(point.name, point)
    return list(points.values())


def run_point(point: Point, output: Path, threads: int) -> None:
    """Train one point unless it is finished; its output goes to `fit.log` in the run folder."""
    run_dir = output / point.name
    if _status(run_dir) == "finished":
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "fit.log").open("w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        code = subprocess.run(point.command(run_dir), stdout=log, stderr=log, env=environment).returncode
    print(f"{point.name}: {'done' if code == 0 else f'FAILED with exit code {code}, see {log.name}'}", flush=True)


def _status(run_dir: Path) -> str | None:
    record = run_dir / "run.json"
    return json.loads(record.read_text())["status"] if record.is_file() else None


def table(points: list[Point], output: Path) -> str:
    """Markdown: each point's final validation loss, the best of each arm first, failures named."""
    rows = []
    for point in points:
        folder = output / point.name
        settings = ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in point.settings)
        status = _status(folder)
        loss = float(load_run(folder).curve.loss[-1]) if status == "finished" else float("inf")
        rows.append((point.arm, loss, settings, status or "not run"))
    rows.sort(key=lambda row: (row[0], row[1]))
    lines = ["| arm | settings | final validation loss (nats/token) |", "|---|---|---|"]
    lines += [f"| {a} | {s} | {f'{loss:.4f}' if loss < float('inf') else status} |" for a, loss, s, status in rows]
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """`anlit sweep CONFIG --output DIR [--jobs N] [--threads N]`."""
    parser = argparse.ArgumentParser(prog="anlit sweep", description=__doc__)
    parser.add_argument("config", help="YAML with `arms`: name → {configs: [files], grids: [{key: [values]}]}")
    parser.add_argument("--output", required=True, help="folder of the run folders and of sweep.md")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1)), help="CPU threads of each run")
    arguments = parser.parse_args(argv)
    points, output = read_points(arguments.config), Path(arguments.output)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda point: run_point(point, output, arguments.threads), points))
    text = table(points, output)
    (output / "sweep.md").write_text(text)
    print(text)
    return 0 if all(_status(output / point.name) == "finished" for point in points) else 1
