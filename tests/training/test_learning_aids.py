"""The learning-rate range test, and the settings that TensorBoard's HParams tab reads."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from anlit.errors import UserError
from anlit.training.callbacks import HyperParameters, LearningRateRange
from anlit.training.callbacks.learning_rate_range import has_lost, smoothed, suggestion
from tests.models.tiny import ARCHITECTURES, adamw, batches, tiny

QUIET = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


class Rates(L.Callback):
    """The rates that the optimizer really takes its steps with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_rate_grows_from_low_to_high_and_the_best_is_told(architecture: Any, tmp_path: Path) -> None:
    rates = Rates()
    trainer = L.Trainer(
        max_steps=60, accelerator="cpu", logger=False, default_root_dir=str(tmp_path),
        callbacks=[LearningRateRange(1e-5, 1e-1, steps=60), rates], **QUIET,
    )  # fmt: skip
    trainer.fit(tiny(architecture, optimizer=adamw(3.0)), batches(4, 16))
    record = json.loads((tmp_path / "lr_range.json").read_text())
    expected = np.geomspace(1e-5, 1e-1, 60)[: len(rates.seen)]
    assert rates.seen == pytest.approx(list(expected))
    assert record["rate"] == pytest.approx(rates.seen)
    assert len(record["loss"]) == len(rates.seen) > 30
    assert 1e-4 < record["steepest"] <= record["lowest"] <= 1e-1
    assert (tmp_path / "lr_range.png").read_bytes().startswith(b"\x89PNG")


def test_groups_keep_their_proportions(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [layer.weight], "lr": 0.2}, {"params": [layer.bias], "lr": 0.02}])
    test = LearningRateRange(1e-3, 1.0, steps=20)
    trainer = L.Trainer(max_steps=20, logger=False, accelerator="cpu", **QUIET)
    trainer.strategy.optimizers = [optimizer]
    test.on_train_start(trainer, L.LightningModule())
    test.on_train_batch_start(trainer, L.LightningModule(), None, 0)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 1e-4])


def test_the_test_ends_when_half_of_the_gain_is_lost() -> None:
    falling = list(np.linspace(4, 3, 20))
    assert not has_lost(falling)
    assert not has_lost([*falling, 3.4])
    assert has_lost([*falling, 3.6])
    assert not has_lost([4, 3, 4.5])
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    rates = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert suggestion(rates, [4.0, 3.9, 3.2, 3.1, 3.5]) == (1e-3, 1e-1)


@pytest.mark.parametrize(("settings", "words"), [({"low": 2.0}, "0 < low < high"), ({"steps": 5}, "20 steps or more")])
def test_senseless_settings_are_told(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        LearningRateRange(**settings)


def test_too_short_a_run_is_told(tmp_path: Path) -> None:
    trainer = L.Trainer(max_steps=10, accelerator="cpu", logger=False, callbacks=[LearningRateRange()], **QUIET)
    with pytest.raises(UserError, match="max_steps=10 ends LearningRateRange before its 100 steps"):
        trainer.fit(tiny(ARCHITECTURES[0]), batches(40, 16))


def test_tensorboard_gets_the_settings_and_the_curve_of_val_loss_stays_as_it_is(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), "", "")
    trainer = L.Trainer(
        max_steps=4, val_check_interval=2, limit_val_batches=1, accelerator="cpu", logger=logger,
        log_every_n_steps=1, callbacks=[HyperParameters()], **QUIET,
    )  # fmt: skip
    trainer.fit(tiny(ARCHITECTURES[2], qk_norm=False), batches(16, 16), batches(4, 16))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("val/loss")] == [1, 3]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["architecture"].string_value == "AnGPT"
    assert values["model.qk_norm"].bool_value is False
    assert values["model.d_model"].number_value == 32
    assert values["trainer.max_steps"].number_value == 4
    assert not any("_instantiator" in name for name in values)
    experiment = HParamsPluginData.FromString(events.summary_metadata["_hparams_/experiment"].plugin_data.content)
    assert [metric.name.tag for metric in experiment.experiment.metric_infos] == ["val/loss"]
