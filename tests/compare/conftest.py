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
CONFIG = {
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
RECORD = {
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
FALLING = {100: 5.0, 200: 4.0, 300: 3.5, 400: 3.0}
"""The losses of a baseline by tokens. Its final loss is easy to cross."""


def ten_tokens_a_second(tokens: float) -> float:
    return 0.1 * tokens


def write_run(
    folder: Path,
    config: Any,
    record: dict[str, Any],
    losses: dict[float, float],
    seconds_of: Callable[[float], float] = ten_tokens_a_second,
) -> None:
    """Write a run folder with validation losses by tokens, at the seconds that tokens take."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "run.json").write_text(json.dumps(RECORD | record))
    rows = ["step,train/loss,val/loss,val/tokens,val/seconds,val/bits_per_byte"]
    for tokens, loss in losses.items():
        step = int(tokens // 10)
        seconds = seconds_of(tokens)
        rows.append(f"{step},{loss},,,,")
        rows.append(f"{step},,{loss},{tokens},{seconds},{loss / 3}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "plot_convergence", lambda *_: None)


@pytest.fixture
def keep_figures(monkeypatch: pytest.MonkeyPatch):
    """keep_figures(module) → a list that gets the module's figures in place of files."""
    figures = []

    def keep(module):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
        return figures

    yield keep
    plt.close("all")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run(name, losses, model, seed=…, settings=…, record=…, seconds_of=…) → folder.

    `losses` are by tokens. `settings` map dotted keys to values.
    """

    def make(
        name,
        losses=FALLING,
        model=GPT,
        seed=1,
        settings=None,
        record=None,
        seconds_of=ten_tokens_a_second,
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
        write_run(folder, config, record or {}, losses, seconds_of)
        return folder

    return make
