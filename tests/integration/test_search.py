"""A study with `search` over real trainings, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.cli import main
from anlit.study.read_study import read_study
from tests.integration.conftest import VOCABULARY
from tests.integration.run_files import model_settings_of, values

RATE = "model.init_args.optimizer.init_args.lr"
DECAY = "model.init_args.optimizer.init_args.weight_decay"
SHAPE = {"vocab_size": VOCABULARY, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 32}
TRAINER = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": 4,
    "val_check_interval": 2,
    "limit_val_batches": 2,
}
TUNE = {
    RATE: {"low": 1.0e-3, "high": 0.1, "scale": "log"},
    "model.init_args.n_layers": {"low": 1, "high": 2},
}


def write_study(folder: Path, shards: Path, tune: dict[str, Any], draws: int = 2) -> Path:
    data = {"class_path": "anlit.TokenShards", "init_args": {"path": str(shards), "batch_size": 4}}
    common = folder / "common.yaml"
    content = {"model": {"init_args": SHAPE}, "data": data, "trainer": TRAINER}
    common.write_text(yaml.safe_dump(content))
    study = {
        "arms": {"GPT": {"configs": ["paper/gpt.yaml", str(common)], "tune": tune}},
        "search": {"method": "sobol", "draws": draws},
        "seeds": [1],
        "sections": ["tuning"],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def test_a_study_trains_its_draws_and_measures_the_best(shards: Path, tmp_path: Path) -> None:
    path = write_study(tmp_path, shards, TUNE)
    out = tmp_path / "out"
    options = ["--config", str(path), "--output", str(out), "--jobs=2", "--threads=1"]

    assert main(["study", *options]) == 0

    study = read_study(str(path), None)
    report = json.loads((out / "report.json").read_text())
    entries = report["tuning"]["GPT"]
    best = min(entries, key=lambda entry: entry["loss"])
    first, second = study.arms[0].points
    settings = values(entries, "setting")
    assert settings in ([first.shown, second.shown], [second.shown, first.shown])
    assert report["selected"]["GPT"] == best["setting"]
    for run in study.tuning_runs():
        config = model_settings_of(out / run.name)
        assert run.point.settings == {
            RATE: config["optimizer"]["init_args"]["lr"],
            "model.init_args.n_layers": config["n_layers"],
        }
    assert "![loss over each range](tuning.png)" in (out / "report.md").read_text()


@pytest.mark.parametrize(("tune", "message"), [
    ({DECAY: {"low": 0, "high": 1}, RATE: TUNE[RATE]},
     f"{DECAY} takes fractions, and both ends of its range are whole numbers: write low as 0.0"),
    ({"model.init_args.qk_norm": {"low": 0.0, "high": 1.0}},
     "is of the wrong type: give true or false"),
    ({"model.init_args.n_layers": {"low": 1.0, "high": 4.0}},
     "is of the wrong type: give an integer"),
    ({RATE: {"low": 0.1, "high": 0.01}}, "has low 0.1 and high 0.01: give a higher high"),
])  # fmt: skip
def test_a_range_that_a_setting_cannot_take_is_refused(
    shards: Path, tmp_path: Path, refusal, tune: dict[str, Any], message: str
) -> None:
    path = write_study(tmp_path, shards, tune)

    error = refusal("study", "--config", path, "--output", tmp_path / "out", "--dry_run")

    assert message in error
    assert "study.yaml" in error


def test_the_shipped_study_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["study", "--config", "study/search.yaml", "--budget", "cpu", "--dry_run"]) == 0

    printed = capsys.readouterr().out
    assert "search: 16 draws by sobol, seed 0" in printed
    assert "angpt: 16 draws of lr 0.001 … 0.03 (log), warmup 0 … 0.6 ×" in printed
    assert "tuning: 32 runs" in printed
