"""One line of progress: steps of the whole run, also after a resume; within 80 columns; lines in a log file."""

import io
import re
from pathlib import Path

import lightning as L
import pytest
from rich.console import Console

from anlit import AnGPT
from anlit.cli import main
from anlit.reporting.text import short_number
from anlit.training.callbacks.progress import RunProgress, clock, numbers
from tests.integration.conftest import fit_arguments
from tests.models.tiny import batches, fit, tiny

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def shown_in_terminal(**trainer: object) -> list[str]:
    written = io.StringIO()
    bar = RunProgress(Console(file=written, force_terminal=True, width=80))
    fit(tiny(AnGPT), callbacks=[bar], enable_progress_bar=True, log_every_n_steps=1, **trainer)
    return re.split(r"[\r\n]+", CONTROL.sub("", written.getvalue()))


def test_a_terminal_has_one_line_of_80_columns() -> None:
    lines = [line for line in shown_in_terminal(max_steps=6) if line.startswith("step")]
    assert lines[-1].startswith("step 6/6 ")
    assert "loss" in lines[-1]
    assert all(len(line) <= 80 for line in lines)


def test_micro_batches_are_no_steps() -> None:
    assert any(line.startswith("step 3/3 ") for line in shown_in_terminal(max_steps=3, accumulate=4))


def test_without_max_steps_the_epochs_say_how_many() -> None:
    written = io.StringIO()
    bar = RunProgress(Console(file=written, force_terminal=True, width=80))
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[bar], logger=False, enable_checkpointing=False,
                        enable_model_summary=False)  # fmt: skip
    model = tiny(AnGPT)
    trainer.fit(model, batches(12, model.context_length, batch_size=4))
    assert "step 6/6 " in CONTROL.sub("", written.getvalue())


def test_a_log_file_has_steps_of_the_whole_run_also_after_a_resume(
    shards: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("--trainer.enable_progress_bar=true", "--trainer.val_check_interval=2")
    main(fit_arguments(shards, tmp_path / "run", *settings, "--trainer.max_steps=4"))
    first = capsys.readouterr().out.splitlines()
    assert first[0].startswith("AnGPT, ")
    assert f"in {tmp_path / 'run'}" in first[0]
    steps = [line.split("  ")[0] for line in first if line.startswith("step")]
    assert steps == ["step 2/4", "step 4/4"]
    assert all("val " in line and "loss " in line for line in first if line.startswith("step"))
    assert not [line for line in first if "Epoch" in line or "TPU" in line or "Tip" in line]
    main(fit_arguments(shards, tmp_path / "run", *settings, "--trainer.max_steps=6", "--ckpt_path=last"))
    resumed = capsys.readouterr().out.splitlines()
    assert resumed[0].endswith("continuing at step 4")
    assert [line.split("  ")[0] for line in resumed if line.startswith("step")] == ["step 6/6"]


def test_numbers_are_short() -> None:
    shown = numbers({"train/tokens_per_second": 12345.6, "loss": 3.21456, "val/loss": 3.3, "other": 1})
    assert shown == "12.3k tokens/s  loss 3.215  val 3.300"
    assert [short_number(x) for x in (0.004, 12, 963, 1.5e6, 2e9)] == ["0.004", "12", "963", "1.5M", "2B"]
    assert [clock(x) for x in (5, 252, 90061)] == ["0:05", "4:12", "25:01:01"]
