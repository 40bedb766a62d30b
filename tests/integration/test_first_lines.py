"""What stands on a terminal while a run goes well: our lines, none of the libraries'."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import lightning.fabric.accelerators.cuda as fabric_cuda
import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator

from anlit.commands.lightning_messages import LOGGERS, hide_messages
from tests.integration.conftest import fit_arguments, run

STEP = r"step 3/3(  \S+ tokens/s)?  loss \S+  val \S+  0:00:00 left"


SETTINGS = (
    "--trainer.precision=bf16-mixed",
    "--trainer.enable_progress_bar=true",
    "--trainer.max_steps=3",
    "--trainer.limit_val_batches=1.0",
    "--data.val_blocks=8",
)


def assert_own_lines(stdout: str, devices: str, run_dir: Path) -> None:
    """The first line is about the run, the next line is about progress.

    A machine that needs 10 s for a step has more lines of progress.
    """
    about, *earlier, progress = stdout.splitlines()
    assert re.fullmatch(rf"AnGPT, \S+ parameters, {devices}, bf16-mixed.*, in {run_dir}", about)
    assert all(line.startswith(("step 1/3  ", "step 2/3  ")) for line in earlier)
    assert re.fullmatch(STEP, progress)


def test_a_run_prints_its_own_lines_alone(shards: Path, tmp_path: Path, capfd) -> None:
    """What imports print is in test_command.py."""
    run_dir = tmp_path / "run"

    assert run(fit_arguments(shards, run_dir, *SETTINGS)) == 0

    printed = capfd.readouterr()
    assert_own_lines(printed.out, "cpu", run_dir)
    assert printed.err == ""


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_the_line_about_a_run_is_above_another_progress_bar(
    shards: Path, tmp_path: Path, capfd, bar: str
) -> None:
    run_dir = tmp_path / "run"

    assert run(fit_arguments(shards, run_dir, *SETTINGS, f"--trainer.callbacks+={bar}")) == 0

    first = capfd.readouterr().out.splitlines()[0]
    assert re.fullmatch(rf"AnGPT, \S+ parameters, cpu, bf16-mixed.*, in {run_dir}", first)


def test_a_run_prints_once_if_lightning_starts_its_second_rank(
    shards: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    ranks = ("--trainer.devices=2", "--trainer.strategy=ddp")
    command = [sys.executable, "-m", "anlit", *fit_arguments(shards, run_dir, *SETTINGS, *ranks)]

    process = subprocess.run(command, capture_output=True, text=True, check=True)

    assert_own_lines(process.stdout, "2 × cpu", run_dir)
    assert process.stderr == ""


def test_what_lightning_says_of_a_gpu_is_hidden(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own functions speak; this machine only claims to have the GPU. Other messages stay."""
    hide_messages()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(fabric_cuda, "_is_ampere_or_later", lambda device: True)
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    fabric_cuda._check_cuda_matmul_precision.cache_clear()
    caplog.set_level(logging.INFO)

    with monkeypatch.context() as patch:
        for name in LOGGERS:
            patch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
        fabric_cuda._check_cuda_matmul_precision(torch.device("cuda", 0))
        CUDAAccelerator.set_nvidia_flags(0)
        logging.getLogger("lightning.fabric.utilities.rank_zero").info("something else")

    assert set(caplog.messages) == {"something else"}
