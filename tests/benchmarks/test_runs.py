"""Steps of finished runs in turns: what is built, what is written, what the comparison makes of it."""

import json
from pathlib import Path

import pytest
import yaml

from anlit.analysis.compare import compare
from anlit.analysis.groups import group_runs
from anlit.analysis.runs import load_run
from anlit.analysis.wall_clock import FILE, read_paired
from anlit.benchmarks import runs
from anlit.errors import UserError

SHAPE = {"vocab_size": 64, "context_length": 32, "n_layers": 1, "n_heads": 2, "d_model": 16}
LOSSES = {"GPT": (5.0, 4.0, 3.0), "NGPT": (4.5, 3.0, 2.5), "AnGPT": (4.0, 2.8, 2.4)}


def make(folder: Path, model: str, lr: float = 0.01, **record: object) -> str:
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr}}
    config = {
        "seed_everything": 1,
        "model": {"class_path": f"anlit.{model}", "init_args": {**SHAPE, "optimizer": optimizer}},
        "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "x", "batch_size": 4}},
        "trainer": {"precision": None},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps({"status": "finished", **record}))
    rows = [f"{loss},{100 * n},{n}" for n, loss in enumerate(LOSSES[model], 1)]
    (folder / "metrics.csv").write_text("\n".join(["val/loss,val/tokens,val/seconds", *rows]))
    return str(folder)


def test_the_comparison_has_wall_clock_from_steps_in_turns(tmp_path: Path) -> None:
    from anlit.reporting.provenance import machine

    hardware = {"hardware": {**machine(), "threads": 1, "devices": ["cpu"]}}
    folders = [make(tmp_path / "runs" / model, model, **hardware) for model in ("GPT", "AnGPT", "NGPT")]
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / FILE
    assert runs.main([*folders[:2], "--output", str(output), "--rounds", "3", "--device", "cpu"]) == 0
    paired = read_paired(output.parent)
    groups = group_runs([load_run(Path(folder)) for folder in folders])
    assert set(paired.seconds) == {group.key for group in groups[:2]}
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in paired.seconds.values())

    report = compare([str(tmp_path / "runs")], str(output.parent))
    raw = json.loads(report.json.read_text())
    found = {claim["label"]: claim for claim in raw["claims"]}
    time, speed = found["anGPT, plain"]["time_per_token"], found["anGPT, plain"]["speedup_wall_clock"]
    in_tokens = next(group for group in raw["groups"] if group["label"] == "anGPT, plain")["speedup_tokens"]["mean"]
    assert speed["median"] == pytest.approx(in_tokens / time["median"])
    assert (speed["low"], speed["high"]) == pytest.approx((in_tokens / time["high"], in_tokens / time["low"]))
    assert found["nGPT, plain"]["time_per_token"] is None
    assert any(note.startswith("nGPT, plain: no steps were timed for it") for note in raw["notes"])
    assert raw["paired_steps"]["arms"][0]["run"] == folders[0]


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_only_models_and_optimizers_are_built(tmp_path: Path, place: str) -> None:
    folder = Path(make(tmp_path / "run", "GPT"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    foreign = {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path}/ran"}}
    if place == "model":
        config["model"] = foreign
    else:
        config["model"]["init_args"]["optimizer"] = foreign
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match=r"cannot be built|does not give vocab_size"):
        runs.main([str(folder), "--output", str(tmp_path / "x.json"), "--device", "cpu"])
    assert not (tmp_path / "ran").exists()
