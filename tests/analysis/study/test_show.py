"""What the console ends with, and the setting that every report names."""

from pathlib import Path

from rich.console import Console

from anlit.analysis.study.plan import read_study
from anlit.analysis.study.report import paragraphs, show
from anlit.analysis.study.results import results_of

from .conftest import write_study
from .test_report import final, train


def test_the_table_names_settings_losses_and_speed_ups_and_fits_80_columns(folder: Path) -> None:
    study = read_study(write_study(folder), None)
    train(study, folder / "out", final, {"angpt": 1.1})
    console = Console(width=80, record=True)
    show(results_of(study, folder / "out", "x"), console)
    lines = console.export_text().splitlines()
    gpt, angpt = (next(line for line in lines if line.startswith(f"{title} ")) for title in ("GPT+", "anGPT"))
    assert "lr=0.2" in gpt
    assert "1.00" in gpt
    assert " … " in angpt
    assert "GPT…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_a_report_without_the_section_tuning_names_the_winning_settings(folder: Path) -> None:
    study = read_study(write_study(folder, sections=["convergence"]), None)
    train(study, folder / "out", lambda run, values, parameters, tokens: 3.0 + values["lr"])
    results = results_of(study, folder / "out", "x")
    assert "lr 0.1 is the smallest of 3" in "\n".join(paragraphs(results))
    console = Console(width=80, record=True)
    show(results, console)
    assert "note: gpt: lr 0.1 is the smallest of 3" in console.export_text()
