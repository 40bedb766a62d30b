"""Synthetic run folders, written in the layout that training writes."""

import copy
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

CONFIG: dict[str, Any] = {
    "seed_everything": 1,
    "model": {
        "class_path": "anlit.models.gpt.GPT",
        "init_args": {
            "vocab_size": 1024,
            "context_length": 256,
            "attention": None,
            "positions": {"class_path": "anlit.layers.positions.RoPE", "init_args": {"fraction": 0.5}},
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 0.001, "betas": [0.9, 0.95]},
            },
        },
    },
    "data": {"class_path": "anlit.data.Tokens", "init_args": {"path": "data/a", "batch_size": 16, "seed": 1}},
    "trainer": {"max_steps": 1000, "logger": True, "callbacks": None, "val_check_interval": 100},
    "run_dir": "runs/a",
    "ckpt_path": None,
}
RECORD: dict[str, Any] = {
    "anlit": "0.1.0",
    "versions": {"python": "3.12", "torch": "2.11"},
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "command": "anlit fit --config a.yaml",
    "hardware": {"cpu": "test", "cores": 2, "devices": ["cpu"]},
    "data": {"corpus": "small", "content_sha256": "c0", "tokenizer_sha256": "t0", "tokens": 1000},
    "parameters": 1000,
    "status": "finished",
    "error": None,
}
# Loss by tokens of a baseline whose final loss, 3.0, is easy to cross.
FALLING = [(100, 5.0), (200, 4.0), (300, 3.5), (400, 3.0)]

MakeRun = Callable[..., Path]


def rows(points: list[tuple[float, float]], seconds_per_token: float = 0.1) -> list[dict[str, Any]]:
    """Log rows for validation `points` (tokens, loss), each after a row of training."""
    found: list[dict[str, Any]] = []
    for tokens, loss in points:
        found.append({"step": tokens // 10, "train/loss": loss})
        row = {"step": tokens // 10, "val/loss": loss, "val/tokens": tokens, "val/bits_per_byte": loss / 3}
        found.append(row | {"val/seconds": tokens * seconds_per_token})
    return found


def write_metrics(folder: Path, log: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(key for row in log for key in row))
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(log)


@pytest.fixture
def drawn() -> Iterator[list[Figure]]:
    """Figures that a test keeps in place of saving them; closed after it."""
    figures: list[Figure] = []
    yield figures
    for figure in figures:
        plt.close(figure)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(name, points, model=…, seed=…, settings={dotted key: value}, record={…}) → folder."""

    def make(
        name: str,
        points: list[tuple[float, float]] = FALLING,
        model: str = "anlit.models.gpt.GPT",
        seed: int = 1,
        settings: dict[str, Any] | None = None,
        record: dict[str, Any] | None = None,
        seconds_per_token: float = 0.1,
    ) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        config = copy.deepcopy(CONFIG)
        config["model"]["class_path"] = model
        config["run_dir"] = str(folder)
        config["seed_everything"] = config["data"]["init_args"]["seed"] = seed
        for key, value in (settings or {}).items():
            *path, last = key.split(".")
            node = config
            for part in path:
                node = node[part]
            node[last] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "run.json").write_text(json.dumps(RECORD | (record or {})))
        write_metrics(folder, rows(points, seconds_per_token))
        return folder

    return make
