"""One line of progress: steps of the whole run within 80 columns."""

import io
import re

import lightning as L
import pytest
from rich.console import Console

from anlit import AnGPT
from anlit.reporting.text import short_number
from anlit.training.callbacks.progress import RunProgress, numbers
from tests.models.tiny import batches, tiny

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.mark.parametrize(
    ("trainer", "last"),
    [
        ({"max_steps": 6}, "step 6/6 "),
        ({"max_steps": 3, "accumulate_grad_batches": 4}, "step 3/3 "),  # micro-batches are no steps
        ({"max_epochs": 2}, "step 6/6 "),  # without max_steps the epochs say how many
    ],
)
def test_a_terminal_has_one_line_of_80_columns(trainer: dict[str, int], last: str) -> None:
    written = io.StringIO()
    bar = RunProgress(Console(file=written, force_terminal=True, width=80))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    model = tiny(AnGPT)
    data = batches(12, model.context_length, batch_size=4)
    L.Trainer(accelerator="cpu", devices=1, callbacks=[bar], log_every_n_steps=1, **quiet, **trainer).fit(model, data)
    shown = re.split(r"[\r\n]+", CONTROL.sub("", written.getvalue()))
    lines = [line for line in shown if line.startswith("step")]
    assert lines[-1].startswith(last)
    assert "loss" in lines[-1]
    assert all(len(line) <= 80 for line in lines)


def test_numbers_are_short() -> None:
    shown = numbers({"train/tokens_per_second": 12345.6, "loss": 3.21456, "val/loss": 3.3, "other": 1})
    assert shown == "12.3k tokens/s  loss 3.215  val 3.300"
    assert [short_number(x) for x in (0.004, 12, 963, 1.5e6, 2e9)] == ["0.004", "12", "963", "1.5M", "2B"]
