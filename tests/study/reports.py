"""Studies of synthetic runs, and their reports as texts, rows of tables and names of pictures."""

import math
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from anlit.reporting.text import minus
from anlit.study.plan import Study
from anlit.study.report import print_summary, write_report
from anlit.study.results import StudyResults, read_results
from tests.study.conftest import UNTUNED_ARMS, changed_study
from tests.study.synthetic import Final, train

FINAL_LOSSES = {
    "gpt": {1: 3.50, 2: 3.53, 3: 3.49},
    "angpt": {1: 3.30, 2: 3.36, 3: 3.31},
}
GPT_LOSSES = list(FINAL_LOSSES["gpt"].values())
ANGPT_LOSSES = list(FINAL_LOSSES["angpt"].values())
COMMAND = "anlit study --config study.yaml"


def final(run, values, parameters, tokens):
    """`FINAL_LOSSES` at a rate of 0.2, more at other rates.

    anGPT fails at 0.4, and GPT+ diverges late at 0.1.
    """
    name = run.arm.base
    rate = values.get("lr", 0.2)
    if name == "angpt" and rate == 0.4:
        return math.nan
    if name == "gpt" and rate == 0.1:
        return math.inf
    return FINAL_LOSSES[name].get(values["seed"], 3.4) + abs(rate - 0.2)


def trained(folder: Path, loss: Final = final, **changes: object) -> Study:
    """The study with changes, after its runs."""
    study = changed_study(folder, **changes)
    train(study, folder / "out", loss)
    return study


def results(study: Study) -> StudyResults:
    return read_results(study, Path("out"), COMMAND)


class Page:
    """A report in Markdown: its text, the rows of its tables, and the names of its pictures.

    `rows` are lists of cells, heads included. Other ways to a row give its cells by column.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.pictures = re.findall(r"^!\[.*\]\((.*)\)$", self.text, re.MULTILINE)
        self.rows: list[list[str]] = []
        self.rows_by_column: list[dict[str, str]] = []
        head: list[str] = []
        for line in self.text.splitlines():
            if not line.startswith("|"):
                head = []
            elif "---" not in line:
                text = re.sub(r"[`*\\]", "", line)
                cells = [cell.strip() for cell in text.strip("|").split("|")]
                self.rows.append(cells)
                if head:
                    self.rows_by_column.append(dict(zip(head, cells, strict=True)))
                else:
                    head = cells

    def table(self, column: str) -> list[dict[str, str]]:
        """The rows of tables with a column."""
        return [row for row in self.rows_by_column if column in row]

    def rows_of(self, beginning: str, column: str) -> list[dict[str, str]]:
        """The rows that begin with a text, in tables with a column."""
        rows = []
        for row in self.table(column):
            first_cell, *_ = row.values()
            if first_cell.startswith(beginning):
                rows.append(row)
        return rows

    def row(self, beginning: str, column: str) -> dict[str, str]:
        return self.rows_of(beginning, column)[0]


def report(study: Study) -> Page:
    """The study's page, which explains each ± in it."""
    page = Page(write_report(results(study)).with_suffix(".md"))
    if "±" in str(page.rows):
        assert re.search(r"standard\s+deviation over\s+seeds", page.text), "± is not explained"
    return page


def printed_summary(study: Study) -> str:
    """What the console shows at the end, in 80 columns."""
    console = Console(width=80, record=True)
    print_summary(results(study), console)
    printed = console.export_text()
    assert max(map(len, printed.splitlines())) <= 80
    return printed


def words_of_line(text: str, beginning: str) -> list[str]:
    """The words of the only line that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(beginning)]
    return line.split()


def with_interval(form: str, mean: float, low: float, high: float) -> str:
    """`−0.2000 (−0.3000 … −0.1000)`."""
    return minus(f"{mean:{form}} ({low:{form}} … {high:{form}})")


def report_with(
    section: dict[str, Any], folder: Path, loss: Final = final, **changes: object
) -> Page:
    """The report with a single section on two arms as configured, with changes."""
    options = {"arms": UNTUNED_ARMS, "baseline": None, "sections": [section]}
    return report(trained(folder, loss, **options | changes))
