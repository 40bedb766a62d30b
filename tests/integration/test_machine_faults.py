"""Faults of the machine: a full disk, no memory, a lost process. A sentence, and a checkpoint."""

import csv
import errno
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.summary.writer.record_writer import RecordWriter

from anlit import cli
from anlit.cli import main
from anlit.commands import fit
from anlit.commands.failures import run_error
from anlit.evaluation import samples
from anlit.io.write import appending
from anlit.training import run_folder
from tests.integration.conftest import (
    TINY,
    Train,
    assert_same_training_state,
    callback,
    fit_arguments,
    last_checkpoint,
    run,
)
from tests.integration.ranks import DDP, run_ranks_with_logs
from tests.integration.run_files import logged, samples_of

STEPS = (
    "--trainer.max_steps=9",
    "--trainer.val_check_interval=5",
    "--checkpoint_every_n_steps=1000",
)


def at_step(fault: str, step: int = 6) -> list[str]:
    """Flags for a fault at the start of a step (from 0)."""
    return callback("integration.test_machine_faults.Fault", fault=fault, step=step)


class FullFile(csv.DictWriter):
    """Writes the beginning of a row, as a disk that becomes full does."""

    def __init__(self, file: Any, columns: list[str]) -> None:
        super().__init__(file, columns)
        self.file = file

    def writerows(self, rows: Any) -> None:
        self.file.write("6,0.12")
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_nothing(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def appending_to_full_disk(path: Path) -> Iterator[Any]:
    """Stands in for `appending`: the disk has no space after the text."""
    with appending(path) as file:
        yield file
        file.flush()
        write_nothing()


class Fault(L.Callback):
    """A fault of the machine when optimizer step `step` begins."""

    def __init__(self, fault: str, step: int) -> None:
        self.fault, self.step = fault, step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            getattr(self, self.fault)(Path(trainer.default_root_dir))

    def full_metrics(self, run_dir: Path) -> None:
        csv.DictWriter = FullFile

    def full_curves(self, run_dir: Path) -> None:
        RecordWriter.write = write_nothing

    def full_samples(self, run_dir: Path) -> None:
        samples.appending = appending_to_full_disk

    def lost_folder(self, run_dir: Path) -> None:
        shutil.rmtree(run_dir)

    def lost_worker(self, run_dir: Path) -> None:
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)

    def no_memory_for_a_tensor(self, run_dir: Path) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)

    def no_memory_for_an_array(self, run_dir: Path) -> None:
        np.ones(1 << 50)


def sentence_of(arguments: list[str], log: Path) -> str:
    """Return the sentence that ends a run with exit code 1."""
    codes, (text,) = run_ranks_with_logs(arguments, 1, log)
    assert codes == [1], text
    assert "Traceback" not in text
    (sentence,) = (line for line in text.splitlines() if line.startswith("anlit: error: "))
    return sentence


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("full_metrics", "metrics.csv could not be written (No space left on device)"),
        ("full_curves", "a log of the run could not be written (No space left on device)"),
    ],
)
def test_a_full_disk_under_a_log_saves_the_run(
    shards: Path, tmp_path: Path, trained: Train, fault: str, names: str
) -> None:
    """After the fault the run goes on, and no row of its metrics is missing or cut."""
    whole, cut = trained(*STEPS), tmp_path / "run"
    arguments = fit_arguments(shards, cut, *STEPS)
    sentence = sentence_of([*arguments, *at_step(fault)], tmp_path / "log")
    assert names in sentence
    assert sentence.endswith("then continue with --ckpt_path last")
    assert last_checkpoint(cut)["global_step"] > 6
    assert run([*arguments, "--ckpt_path=last"]) == 0
    assert_same_training_state(last_checkpoint(whole), last_checkpoint(cut))
    for name in ("train/loss", "val/loss"):
        assert logged(whole, name) == logged(cut, name)


def test_a_full_disk_under_the_samples_loses_none(
    shards: Path, tmp_path: Path, trained: Train
) -> None:
    settings = (
        *STEPS,
        "--trainer.callbacks+=anlit.Samples",
        "--trainer.callbacks.prompts=['def main(', 'import os']",
        "--trainer.callbacks.max_tokens=4",
        "--trainer.callbacks+=anlit.Samples",
        "--trainer.callbacks.prompts=['class A']",
        "--trainer.callbacks.max_tokens=4",
    )
    whole, cut = trained(*settings), tmp_path / "run"
    arguments = fit_arguments(shards, cut, *settings)
    sentence = sentence_of([*arguments, *at_step("full_samples", 3)], tmp_path / "log")
    assert "No space left on device" in sentence
    assert samples_of(cut) == []
    assert run([*arguments, "--ckpt_path=last"]) == 0
    assert samples_of(cut) == samples_of(whole)
    assert len(samples_of(cut)) == 6


@pytest.mark.slow
def test_a_full_disk_of_one_rank_ends_both_in_order(shards: Path, tmp_path: Path) -> None:
    arguments = fit_arguments(shards, tmp_path / "run", *STEPS, *DDP, *at_step("full_metrics"))
    codes, (first, second) = run_ranks_with_logs(arguments, 2, tmp_path / "log")
    assert codes == [1, 1]
    assert "metrics.csv could not be written (No space left on device)" in first
    assert "another rank cannot write its logs: make room" in second
    assert last_checkpoint(tmp_path / "run")["global_step"] > 6


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "killed by signal: Killed"),
        ("DataLoader worker (pid(s) 7) exited unexpectedly", "exited unexpectedly"),
    ],
    ids=["by torch's signal handler", "by the wait for a batch"],
)
def test_a_lost_worker_is_named_where_a_logger_wraps_the_error(
    tmp_path: Path, monkeypatch, message: str, cause: str
) -> None:
    """Which of the two texts torch raises, and where in the run, is a matter of time."""

    def interrupted(*_: object) -> None:
        raise RuntimeError(message)

    logger = TensorBoardLogger(tmp_path)
    monkeypatch.setattr(logger.experiment, "add_scalar", interrupted)
    with pytest.raises(ValueError, match="you tried to log") as raised:
        logger.log_metrics({"loss": 1.0}, 1)

    assert f"a process of data.num_workers was lost ({cause})" in str(run_error(raised.value))


@pytest.mark.parametrize("compiler", ["/bin/false", None], ids=["fails", "missing"])
def test_triton_without_a_compiler_of_c_is_explained(
    monkeypatch, tmp_path: Path, compiler: str | None
) -> None:
    """A compiler fails where Python.h is missing."""
    build = pytest.importorskip("triton.runtime.build")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    if hasattr(build, "_find_compiler"):  # newer versions of Triton remember its answer
        monkeypatch.setattr(build, "_find_compiler", build._find_compiler.__wrapped__)

    with pytest.raises((RuntimeError, CalledProcessError)) as raised:
        build._build("launcher", str(tmp_path / "main.c"), str(tmp_path), [], [], [], [])

    assert "install a C compiler and the headers of this Python" in str(run_error(raised.value))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error in: NCCLUtils.cpp:1\nLast error:\nCuda failure 2 'out of memory'",
    ],
    ids=["torch", "the driver", "cuBLAS", "NCCL"],
)
def test_every_library_that_finds_no_memory_on_a_gpu_is_explained(message: str) -> None:
    sentence = str(run_error(RuntimeError(message)))

    assert f"memory is exhausted ({message.splitlines()[0]}): lower data.batch_size" in sentence


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "lost_folder",
            "metrics.csv could not be written (No such file or directory): make room or repair",
        ),
        (
            "lost_worker",
            "): free memory, enlarge /dev/shm, or lower data.num_workers, then continue with",
        ),
        ("no_memory_for_a_tensor", "memory is exhausted ("),
        pytest.param(
            "no_memory_for_an_array",
            "memory is exhausted (Unable to allocate 8.00 PiB",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_of_the_machine_is_one_sentence(
    shards: Path, tmp_path: Path, fault: str, sentence: str
) -> None:
    # Far more batches than a lost worker may have delivered ahead
    settings = (*STEPS, "--trainer.max_steps=60", "--data.num_workers=1")
    arguments = fit_arguments(shards, tmp_path / "run", *settings)
    error = sentence_of([*arguments, *at_step(fault)], tmp_path / "log")
    assert sentence in error
    assert error.endswith("then continue with --ckpt_path last")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EAGAIN])
def test_data_workers_that_cannot_be_started_are_named(
    shards: Path, tmp_path: Path, monkeypatch, capsys, code: int
) -> None:
    """A queue needs room in /dev/shm for its locks; a fork needs a process and memory."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    tracebacks: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", tracebacks.append)
    if code == errno.ENOSPC:
        monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", fail)
    else:
        monkeypatch.setattr(os, "fork", fail)
    assert main(fit_arguments(shards, tmp_path, *STEPS, "--data.num_workers=2")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    reason = f"the 2 processes of data.num_workers cannot be started ({os.strerror(code)})"
    assert error.startswith(f"anlit: error: {reason}: free memory, enlarge /dev/shm (a container")
    assert error.endswith("or set --data.num_workers 0")
    gc.collect()
    assert not tracebacks, "torch prints none when it frees the loader"


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback …\n"
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_19511_178597_0>: "
            "No space left on device (28)",
            "No space left on device",
        ),
        (
            "unable to write to file </torch_22_1785978232_0>: No space left on device (28)",
            "No space left on device",
        ),
        (
            "unable to open shared memory object </torch_2_17_0> in read-write mode: "
            "Too many open files (24)",
            "Too many open files",
        ),
    ],
)
def test_a_batch_that_workers_cannot_share_is_explained(message: str, cause: str) -> None:
    """Containers have 64 MB of /dev/shm by default. Loaders of users send tensors through it."""
    sentence = str(run_error(RuntimeError(message)))

    assert f"a data worker cannot share a batch ({cause}): free memory, enlarge" in sentence


def test_a_run_that_finished_between_the_first_look_and_the_lock_is_not_overwritten(
    shards: Path, tmp_path: Path, finished: Path, monkeypatch, refusal
) -> None:
    """Two commands use the same new folder. Ctrl-Z stops the first until the second has ended."""
    run_dir, lock = tmp_path / "run", run_folder.lock_run_folder

    def lock_later(folder: str) -> Any:
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        return lock(folder)

    monkeypatch.setattr(fit.run_folder, "lock_run_folder", lock_later)
    error = refusal(*fit_arguments(shards, run_dir))
    assert f"run_dir={run_dir} already holds a run: continue it with --ckpt_path last" in error
    assert (run_dir / "metrics.csv").read_bytes() == (finished / "metrics.csv").read_bytes()
    assert last_checkpoint(run_dir)["global_step"] == 20


@pytest.mark.parametrize("name", [".fit.lock", "metrics.csv"])
def test_a_folder_where_a_run_writes_a_file_is_refused(
    shards: Path, tmp_path: Path, refusal, name: str
) -> None:
    (tmp_path / name).mkdir(parents=True)
    error = refusal(*fit_arguments(shards, tmp_path))
    assert error.endswith(f"{name} is a folder, and a run writes a file there: remove the folder")


def test_a_part_that_a_killed_sharded_run_left_is_replaced(shards: Path, tmp_path: Path) -> None:
    """It is a folder, and a run on a single device writes a file there."""
    partial = tmp_path / "checkpoints" / ".partial-last.ckpt"
    partial.mkdir(parents=True)
    (partial / "shard-00001.safetensors").write_bytes(b"cut short")
    assert main(fit_arguments(shards, tmp_path, "--trainer.max_steps=2")) == 0
    assert last_checkpoint(tmp_path)["global_step"] == 2
    assert not partial.exists()


def test_a_run_folder_whose_name_is_not_utf_8_is_refused(
    shards: Path, tmp_path: Path, refusal
) -> None:
    run_dir = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    assert "is not valid UTF-8" in refusal(*fit_arguments(shards, Path(run_dir)))
    assert not Path(run_dir).exists()


def fill_disk() -> None:
    """Let no file grow, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


STUDY = """
seeds: [1]
sections: [convergence]
shared: {configs: [shared.yaml]}
arms: {gpt: {title: GPT+}, angpt: {title: anGPT, settings: {model.class_path: anlit.AnGPT}}}
baseline: gpt
"""


@pytest.mark.parametrize("command", ["export", "study"])
def test_a_full_disk_ends_each_command_with_a_sentence(
    command: str, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump(TINY | {"run_dir": None}))
    arguments = {
        "export": ["export", str(finished), "--output=exported"],
        "study": ["study", "--config=study.yaml", "--output=study"],
    }

    result = subprocess.run(
        [sys.executable, "-m", "anlit", *arguments[command]],
        cwd=tmp_path,
        preexec_fn=fill_disk,
        capture_output=True,
        text=True,
    )

    assert result.returncode == 1
    assert "unforeseen" not in result.stderr
    assert "cannot be written (File too large): make room, then repeat the command" in result.stderr
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_file_that_the_system_refuses_is_named(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The superuser, who runs tests in containers, is refused nothing."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code), "/data/corpus.json")

    monkeypatch.setattr(cli, "_run", refuse)

    assert cli.main(["runs"]) == 1

    error = capsys.readouterr().err
    assert f"anlit: error: /data/corpus.json cannot be opened ({os.strerror(code)}): " in error
    assert "unforeseen" not in error


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_characters_gets_a_table(
    encoding: str, finished: Path, tmp_path: Path
) -> None:
    """anlit prints –, ± and √, and the names that users give."""
    for name in ("breit", "τ"):
        shutil.copytree(finished, tmp_path / name)

    result = subprocess.run(
        [sys.executable, "-m", "anlit", "runs", str(tmp_path)],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
    )

    assert result.returncode == 0
    assert b"breit" in result.stdout
    assert b"\\u03c4" in result.stdout
