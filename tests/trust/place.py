"""What each case of the table has: a folder of its own with a trained run, and commands in forked processes."""

import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from anlit.cli import main
from tests.integration.ranks import start_ranks


@dataclass(frozen=True)
class Outcome:
    """What became of what the user did."""

    code: str
    """Exit code; of several processes one each."""
    said: str
    state: str
    """Of the files, in a few words."""


class Place:
    """The case's own folder.

    Args:
        folder: Empty.
        base: Has `run`, trained by the command line on `data`, and `shards`, a larger corpus.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base = folder, base
        self.data, self.shards = base / "data", base / "shards"
        self.marker, self.output, self.run = folder / "marker", folder / "output", folder / "run"
        shutil.copytree(base / "run", self.run)

    @property
    def shell(self) -> dict[str, Any]:
        """A configured object that makes the marker where it is called."""
        return {"class_path": "os.system", "init_args": {"command": f"mkdir {self.marker}"}}

    @property
    def process(self) -> dict[str, Any]:
        """The same as a class."""
        return {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", str(self.marker)]}}

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "last.ckpt"

    def change_checkpoint(self, change: Callable[[dict[str, Any]], Any]) -> Path:
        content = torch.load(self.checkpoint, weights_only=True)
        change(content)
        torch.save(content, self.checkpoint)
        return self.checkpoint

    def change_config(self, change: Callable[[dict[str, Any]], Any]) -> Path:
        file = self.run / "config.yaml"
        content = yaml.safe_load(file.read_text())
        change(content)
        file.write_text(yaml.safe_dump(content))
        return file

    def own_data(self) -> Path:
        return Path(shutil.copytree(self.data, self.folder / "data", dirs_exist_ok=True))

    def fit(self, *more: str, run_dir: Path | None = None) -> list[str]:
        """`anlit fit` with the run's configuration, by default in its folder."""
        own = [f"--config={self.base}/run/config.yaml", f"--run_dir={run_dir or self.run}"]
        return ["fit", *own, "--trainer.max_steps=4", *more]

    def command(self, *arguments: Any, state: Callable[[], str] | None = None) -> Outcome:
        """`anlit` in a forked process.

        Args:
            arguments: Of the command line.
            state: Looks at the files afterwards; by default whether anything ran or changed.
        """
        log, before = self.folder.parent / f"{self.folder.name}.log", self.hashes()
        process = multiprocessing.get_context("fork").Process(target=_anlit, args=([*map(str, arguments)], log))
        process.start()
        process.join(300)
        said = log.read_text(errors="replace")
        return Outcome(str(process.exitcode), said, self.facts(before) if state is None else state())

    def fresh(self, *arguments: str, state: Callable[[], str], **environment: str) -> Outcome:
        """`anlit` in a process that inherits no threads."""
        command = [sys.executable, "-m", "anlit", *arguments]
        both = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
        done = subprocess.run(command, env=both, timeout=300, capture_output=True, text=True)
        return Outcome(str(done.returncode), done.stderr, state())

    def ranks(self, arguments: list[str], number: int, state: Callable[[], str]) -> Outcome:
        """`anlit` on several ranks."""
        processes = start_ranks(arguments, number, log=self.folder / "log")
        for process in processes:
            process.join(300)
        said = "\n".join((self.folder / f"log.{rank}").read_text() for rank in range(number))
        return Outcome(", ".join(str(process.exitcode) for process in processes), said, state())

    def facts(self, before: dict[str, str]) -> str:
        ran = "foreign code ran" if self.marker.exists() else "nothing foreign ran"
        after = self.hashes()
        changed = [name for name in before if after.get(name) != before[name]]
        return f"{ran}, {'files as before' if not changed else 'changed: ' + ', '.join(changed)}"

    def hashes(self) -> dict[str, str]:
        """Of all files that there are."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name != ".fit.lock"]
        return {str(p.relative_to(self.folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    def status(self, run_dir: Path | None = None) -> str:
        """run.json's word, and the step of last.ckpt."""
        folder = run_dir or self.run
        word = json.loads((folder / "run.json").read_text())["status"]
        last = folder / "checkpoints" / "last.ckpt"
        rest = last / "meta.pt" if last.is_dir() else last
        return f"run.json: {word}, last.ckpt of step {torch.load(rest, weights_only=True)['global_step']}"


def _anlit(arguments: list[str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for logger in ("", "lightning.pytorch"):  # its messages went to pytest's standard error
        logging.getLogger(logger).handlers.clear()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    raise SystemExit(main(arguments))


@dataclass(frozen=True)
class Case:
    """One row: what the user does, and what has to become of it."""

    letter: str
    does: str
    act: Callable[[Place], Outcome]
    code: str
    says: str
    """A regular expression that one line of what was printed has."""
    state: str


def sentence(said: str, pattern: str) -> str | None:
    """The line with the pattern, without what the folders of this run are called."""
    for line in said.splitlines():
        if re.search(pattern, line):
            short = re.sub(r"(?<![:/])/\S*/(?=[\w.-]+)", "", line.removeprefix("anlit: error: "))
            return " ".join(short.split())
    return None


NOTHING = "nothing foreign ran, files as before"
