"""Synthetic run folders, written in the layout that training writes."""

import copy
import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import pyplot as plt

from anlit.compare import plots

ROPE = {"class_path": "anlit.nn.layers.positions.RoPE", "init_args": {"fraction": 0.5}}
ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.001, "betas": [0.9, 0.95]}}
CONFIG: dict[str, Any] = {
    "seed_everything": 1,
    "run_dir": "runs/a",
    "ckpt_path": None,
    "model": {
        "class_path": "anlit.training.models.GPT",
        "init_args": {
            "vocab_size": 1024,
            "context_length": 256,
            "attention": None,
            "positions": ROPE,
            "optimizer": ADAMW,
        },
    },
    "data": {
        "class_path": "anlit.data.Tokens",
        "init_args": {"path": "data/a", "batch_size": 16, "seed": 1},
    },
    "trainer": {
        "max_steps": 1000,
        "logger": True,
        "callbacks": None,
        "val_check_interval": 100,
    },
}
HARDWARE = {"cpu": "test", "cores": 2, "devices": ["cpu"]}
RECORD: dict[str, Any] = {
    "anlit": "0.1.0",
    "versions": {"python": "3.12", "torch": "2.11"},
    "command": "anlit fit --config a.yaml",
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "hardware": HARDWARE,
    "parameters": 1000,
    "data": {"corpus": "small", "content_sha256": "c0", "tokenizer_sha256": "t0", "tokens": 1000},
    "status": "finished",
    "error": None,
}
GPT = "anlit.training.models.GPT"
NGPT = "anlit.training.models.NGPT"
ANGPT = "anlit.training.models.AnGPT"
FALLING = [(100, 5.0), (200, 4.0), (300, 3.5), (400, 3.0)]
"""Tokens and loss of each validation of a baseline whose final loss is easy to cross."""


def write_run(
    folder: Path, config: Any, record: dict[str, Any], points: Any, seconds_of: Any
) -> None:
    """A run folder; `seconds_of` tokens is the time of a validation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps(RECORD | record))
    rows = ["step,train/loss,val/loss,val/tokens,val/seconds,val/bits_per_byte"]
    for tokens, loss in points:
        rows.append(f"{tokens // 10:.0f},{loss},,,,")
        rows.append(f"{tokens // 10:.0f},,{loss},{tokens},{seconds_of(tokens)},{loss / 3}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "plot_convergence", lambda *_: None)


@pytest.fixture
def drawn():
    """Figures that a test keeps in place of saving them; closed after it."""
    yield []
    plt.close("all")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run(name, points, model, seed=…, settings=…, record=…, seconds_of=…) → folder.

    `settings` map dotted keys to values, `seconds_of` tokens to the time of a validation.
    """

    def make(
        name,
        points=FALLING,
        model=GPT,
        seed=1,
        settings=None,
        record=None,
        seconds_of=lambda x: 0.1 * x,
    ):
        folder = tmp_path / "runs" / name
        all_settings = {
            "model.class_path": model,
            "run_dir": str(folder),
            "seed_everything": seed,
            "data.init_args.seed": seed,
            **(settings or {}),
        }
        config = copy.deepcopy(CONFIG)
        for key, value in all_settings.items():
            *path, name_of_value = key.split(".")
            reduce(dict.__getitem__, path, config)[name_of_value] = value
        write_run(folder, config, record or {}, points, seconds_of)
        return folder

    return make
