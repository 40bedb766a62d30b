"""`anlit study` over real trainings: killed and started again, it reports the same."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from anlit.cli import main
from anlit.study.launch import LOCK
from tests.data.processes import wait_for
from tests.integration.conftest import TINY, VOCABULARY
from tests.integration.run_files import record_of

MODEL = {"vocab_size": VOCABULARY, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 32}
TRAINER = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 5,
    "accelerator": "cpu",
    "max_steps": 40,
    "val_check_interval": 10,
    "limit_val_batches": 2,
}


def write_study(folder: Path, shards: Path) -> None:
    """Two arms, two rates each, two seeds."""
    data = {"class_path": "anlit.TokenShards", "init_args": {"path": str(shards), "batch_size": 4}}
    common = {
        "model": {"init_args": MODEL},
        "data": data,
        "trainer": TRAINER,
        "checkpoint_every_n_steps": 5,
    }
    tune = {"model.init_args.schedule.warmup": [0.0, 0.2]}
    arms = {
        "GPT": {"configs": ["paper/gpt.yaml"], "tune": tune},
        "AnGPT": {"configs": ["paper/angpt.yaml"], "tune": tune},
    }
    study = {
        "baseline": "GPT",
        "arms": arms,
        "shared": {"configs": ["common.yaml"]},
        "seeds": [1, 2],
    }
    for name, content in {"common": common, "study": study}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))


def start(folder: Path) -> "subprocess.Popen[bytes]":
    options = ["--config", "study.yaml", "--output", "out", "--jobs", "2", "--threads", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "anlit", "study", *options], cwd=folder, start_new_session=True
    )


def results(folder: Path) -> list:
    """Return the entries of the report that do not depend on time."""
    report = json.loads((folder / "report.json").read_text())
    return [report["selected"], report["tuning"], report["points"]]


@pytest.mark.slow
def test_a_killed_study_goes_on_where_it_was_and_reports_the_same(
    tmp_path: Path, shards: Path
) -> None:
    write_study(tmp_path, shards)
    out = tmp_path / "out"
    last = "*/checkpoints/last.ckpt"
    assert start(tmp_path).wait(900) == 0
    undisturbed = results(out.rename(tmp_path / "before"))
    process = start(tmp_path)
    wait_for(lambda: list(out.glob(last)))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for lock in out.glob(f"*/{LOCK}"):  # a killed run may still end what it had asked of the disk
        with lock.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    started = {path.parent.name for path in out.glob("*/run.json")}
    assert start(tmp_path).wait(900) == 0
    continued = set()
    for path in out.glob("*/run.json"):
        if len(record_of(path.parent)["launches"]) > 1:
            continued.add(path.parent.name)
    assert set() < continued <= started
    assert results(out) == undisturbed
    assert len(undisturbed[2][0]["losses"]) == 2


@pytest.mark.parametrize("is_mixture", [False, True])
def test_a_study_does_not_go_on_with_other_data_in_the_same_folder(
    tmp_path: Path, monkeypatch, refusal, is_mixture: bool
) -> None:
    """Means over seeds would be of two corpora."""
    monkeypatch.chdir(tmp_path)
    data = {"class_path": "anlit.TokenShards", "init_args": {"path": "corpus"}}
    if is_mixture:
        data = {"class_path": "anlit.Mixture", "init_args": {"paths": {"text": "corpus"}}}
    shared = TINY | {"data": data, "run_dir": None}
    study = {
        "arms": {"gpt": {}},
        "baseline": "gpt",
        "seeds": [1],
        "shared": {"configs": ["c.yaml"]},
    }
    Path("c.yaml").write_text(yaml.safe_dump(shared))
    Path("study.yaml").write_text(yaml.safe_dump(study))
    tokenizer = prepare_words("corpus", "the fox and the hound", "--vocab_size=300")
    command = ("study", "--config=study.yaml", "--output=out")
    assert main([*command]) == 0
    shutil.rmtree("corpus")
    prepare_words("corpus", "a storm over the sea", f"--tokenizer={tokenizer}")
    Path("study.yaml").write_text(yaml.safe_dump(study | {"seeds": [1, 2]}))

    error = refusal(*command)

    assert "was trained on other data" in error
    assert "give another --output" in error
    assert main([*command, "--report_only"]) == 1, "the second seed is missing, no error"


def test_a_command_after_a_study_knows_the_classes_of_its_runs(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ownmodel.py").write_text("import anlit\n\n\nclass Own(anlit.GPT):\n    pass\n")
    data = {"class_path": "anlit.TokenShards", "init_args": {"path": str(shards), "batch_size": 2}}
    model = {"class_path": "ownmodel.Own", "init_args": TINY["model"]["init_args"]}
    Path("c.yaml").write_text(yaml.safe_dump(TINY | {"data": data, "model": model}))
    study = {
        "arms": {"own": {}},
        "baseline": "own",
        "seeds": [1],
        "shared": {"configs": ["c.yaml"]},
        "after": {"lengths": "anlit lengths {runs} --lengths 16 --tokens 64 --output {output}"},
    }
    Path("study.yaml").write_text(yaml.safe_dump(study))
    command = [sys.executable, "-m", "anlit", "study", "--config=study.yaml", "--output=out"]

    assert subprocess.run(command).returncode == 0

    assert Path("out/lengths/lengths.json").is_file()


def prepare_words(folder: str, sentence: str, *options: str) -> str:
    """Prepare documents of a sentence; return a copy of their tokenizer."""
    texts = Path(f"{sentence} texts")
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"{number} {sentence}. " * 20)
    arguments = ["--source", str(texts), "--output", folder, *options]
    assert main(["prepare", "TextFiles", *arguments]) == 0
    return str(shutil.copy(Path(folder) / "tokenizer.json", f"{sentence}.json"))
