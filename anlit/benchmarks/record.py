"""The files of a benchmark: a record that grows with each item, and tables."""

import os
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from anlit.checkpoints.loading import device_name
from anlit.reporting.files import output_folder, write_json, write_text
from anlit.reporting.provenance import environment
from anlit.reporting.table import Table, console


class Record:
    """The environment and what was measured so far, in OUTPUT/STEM.json.

    `keep` replaces the complete file, so that a killed run leaves its measurements.

    Args:
        output: The folder, made where missing.
        device: What is measured.
        stem: The name of its files (default: the benchmark's).

    Raises:
        UserError: The folder cannot be written.
    """

    def __init__(
        self, name: str, argv: Sequence[str], output: str, device: torch.device, stem: str = "", **settings: Any
    ) -> None:
        self.device = device
        self._file = output_folder(output) / (stem or name)
        self._began = time.monotonic()
        surroundings = environment()
        surroundings["hardware"] |= {"device": device_name(device), "threads": torch.get_num_threads()}
        command = shlex.join(["anlit", "benchmark", name, *argv])
        self.values: dict[str, Any] = {"benchmark": name, "command": command, "environment": surroundings}
        self.keep(finished=False, **settings)

    def keep(self, **values: Any) -> None:
        """Add these values and write the file."""
        self.values |= values
        write_json(self.path("json"), self.values)

    def path(self, suffix: str) -> Path:
        return self._file.with_name(f"{self._file.name}.{suffix}")

    def finish(self, tables: Iterable[Table], notes: Sequence[str] = ()) -> None:
        """Write the complete record, and the tables as Markdown; print the tables."""
        self.values["environment"]["load_after"] = os.getloadavg()[0]
        self.keep(finished=True, seconds=time.monotonic() - self._began)
        shown = list(tables)
        hardware = self.values["environment"]["hardware"]
        on_cpu = hardware["device"] == "cpu"
        machine = f"{hardware['cpu']}, {hardware['threads']} threads" if on_cpu else hardware["device"]
        lines = [f"# anlit benchmark {self.values['benchmark']}: {machine}", f"`{self.values['command']}`"]
        for table in shown:
            lines += [f"## {table.title}", table.markdown()]
        write_text(self.path("md"), "\n\n".join([*lines, *notes]) + "\n")
        screen = console()
        for table in shown:
            screen.print(table)
        for note in notes:
            screen.print(note)
        screen.print(f"Written to {self._file}.json and .md.", soft_wrap=True)
