"""Every strategy, callback and setting of Lightning is accepted or refused with a fix."""

import inspect
import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import distributed

from anlit import GPT
from anlit.errors import UserError
from anlit.training.support import check_strategy, check_trainer
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import batches, tiny

PAGES = ("scale-out.md", "lightning.md")
ACCEPTED_STRATEGIES = {
    "single_device",
    "ddp",
    "ddp_find_unused_parameters_false",
    "ddp_find_unused_parameters_true",
}
REFUSED_CALLBACKS = {
    "BackboneFinetuning",
    "BaseFinetuning",
    "BatchSizeFinder",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "ModelPruning",
    "OnExceptionCheckpoint",
    "SpikeDetection",
    "StochasticWeightAveraging",
}


class PathFinderLogger(L.Callback):
    """A user's callback with a name like a refused callback."""


class WeightAveragingReport(callbacks.Callback):
    """A user's callback with a name like Lightning's `WeightAveraging`."""


class UserFinder(callbacks.LearningRateFinder):
    """A refused callback under another name."""


class UserEMA(callbacks.EMAWeightAveraging):
    """A mean of weights under another name."""


class UserDDP(DDPStrategy):
    """A user's strategy."""


class UserModelParallel(ModelParallelStrategy):
    """A user's strategy that shards nothing."""


def lightning_strategy(name: str, **arguments: Any) -> dict[str, Any]:
    return configure(f"lightning.pytorch.strategies.{name}", **arguments)


def lightning_callback(name: str, **arguments: Any) -> dict[str, Any]:
    return configure(f"lightning.pytorch.callbacks.{name}", **arguments)


def lightning_plugin(name: str) -> dict[str, Any]:
    return configure(f"lightning.pytorch.plugins.{name}")


def user_object(user_class: type) -> dict[str, Any]:
    return configure(f"{__name__}.{user_class.__name__}")


def configure(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def refusal_of(trainer: dict[str, Any]) -> str:
    """The error for a configuration; "" if it is accepted."""
    try:
        check_trainer(trainer)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", StrategyRegistry)
def test_every_strategy_of_lightning_is_accepted_or_refused_with_a_fix(name: str) -> None:
    message = refusal_of({"strategy": name})

    if name in ACCEPTED_STRATEGIES:
        assert message == ""
    else:
        assert message.startswith(f"trainer.strategy={name} ")
        assert ": set " in message


@pytest.mark.parametrize(
    "strategy",
    [
        "auto",
        configure("anlit.FullySharded"),
        lightning_strategy("DDPStrategy", gradient_as_bucket_view=True),
        user_object(UserDDP),
    ],
)
def test_a_strategy_is_accepted_by_its_class(strategy: Any) -> None:
    assert refusal_of({"strategy": strategy}) == ""


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "nonesuch",
            "trainer.strategy=nonesuch is not known: choose auto, ddp or anlit.FullySharded",
        ),
        (lightning_strategy("DDPStrategy", static_graph=True), "static_graph fails inside torch"),
        (lightning_strategy("DDPStrategy", start_method="fork"), "a signal to the command"),
        (
            lightning_strategy("DDPStrategy", model_averaging_period=2),
            "model_averaging_period changes",
        ),
        (lightning_strategy("ModelParallelStrategy"), "would average no gradients"),
        (user_object(UserModelParallel), "UserModelParallel does not shard"),
        (lightning_strategy("Strategy"), "derive it from DDPStrategy"),
    ],
)
def test_a_strategy_is_refused_by_its_class(strategy: Any, message: str) -> None:
    assert message in refusal_of({"strategy": strategy})


@pytest.mark.parametrize("name", callbacks.__all__)
def test_every_callback_of_lightning_is_accepted_or_refused_with_a_fix(name: str) -> None:
    message = refusal_of({"callbacks": [lightning_callback(name)]})

    if name in REFUSED_CALLBACKS:
        assert message.startswith(f"trainer.callbacks has {name}, which ")
        assert ": " in message
    else:
        assert message == ""


@pytest.mark.parametrize(
    "callback",
    [
        user_object(PathFinderLogger),
        user_object(WeightAveragingReport),
        user_object(UserEMA),
        lightning_callback("EMAWeightAveraging", decay=0.999, update_every_n_steps=1),
        lightning_callback("ModelCheckpoint", save_on_exception=False),
    ],
)
def test_a_callback_is_accepted_by_its_class_and_not_by_its_name(
    callback: dict[str, Any],
) -> None:
    assert refusal_of({"callbacks": callback}) == ""
    assert refusal_of({"callbacks": [callback]}) == ""


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (user_object(UserFinder), "UserFinder, which takes steps that are not the run's"),
        (lightning_callback("ModelCheckpoint", save_on_exception=True), "save_on_exception=true"),
        (lightning_callback("EMAWeightAveraging", decay=0.0), "callbacks.decay=0.0 is out of"),
        (lightning_callback("EMAWeightAveraging", decay=1.0), "more than 0 and less than 1"),
        (
            lightning_callback("EMAWeightAveraging", update_every_n_steps=0),
            "callbacks.update_every_n_steps=0 is out of range: give 1 or more",
        ),
        (
            lightning_callback("EMAWeightAveraging", update_starting_at_epoch=0),
            "counts epochs, and a run may have one: set update_starting_at_step",
        ),
    ],
)
def test_a_callback_is_refused_by_its_class_and_arguments(
    callback: dict[str, Any], message: str
) -> None:
    assert message in refusal_of({"callbacks": callback})
    assert message in refusal_of({"callbacks": [callback]})


def test_two_averages_are_refused_with_the_configuration() -> None:
    averages = [
        lightning_callback("EMAWeightAveraging", decay=0.9),
        configure("anlit.training.callbacks.TailAveraging", share=0.2),
    ]

    assert "EMAWeightAveraging and TailAveraging, and a" in refusal_of({"callbacks": averages})


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("barebones", True, "trainer.barebones=true turns off checkpoints"),
        ("enable_checkpointing", False, "=false leaves nothing to continue from"),
        ("default_root_dir", "there", "trainer.default_root_dir=there would not be used"),
        ("model_registry", "a/b", "trainer.model_registry=a/b would upload"),
        (
            "plugins",
            [lightning_plugin("AsyncCheckpointIO")],
            "has AsyncCheckpointIO, which would write",
        ),
        ("plugins", lightning_plugin("TorchCheckpointIO"), "has TorchCheckpointIO"),
    ],
)
def test_a_setting_without_checkpoints_in_the_run_folder_is_refused(
    setting: str, value: Any, message: str
) -> None:
    assert message in refusal_of({setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("barebones", False),
        ("enable_checkpointing", None),
        ("callbacks", None),
        ("plugins", None),
        ("plugins", [lightning_plugin("TorchSyncBatchNorm")]),
    ],
)
def test_other_values_of_these_settings_are_accepted(setting: str, value: Any) -> None:
    assert refusal_of({setting: value}) == ""


def test_the_strategy_that_auto_chooses_in_a_notebook_is_refused() -> None:
    with pytest.raises(UserError, match="DDPStrategy starts ranks that a signal"):
        check_strategy("DDPStrategy", DDPStrategy, {"start_method": "fork"})


def test_the_pages_name_every_strategy_callback_and_setting() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "".join((docs / page).read_text() for page in PAGES)
    # The page puts the names of these strategies together from two words.
    composed = ("ddp_spawn_", "ddp_fork_", "ddp_notebook_")
    strategies = [name for name in StrategyRegistry if not name.startswith(composed)]
    settings = inspect.signature(L.Trainer).parameters

    for name in [*strategies, *callbacks.__all__, *settings]:
        assert f"`{name}`" in text, name


def test_a_strategy_that_shards_nothing_is_refused_in_python() -> None:
    strategy = ModelParallelStrategy(1, 1, process_group_backend="gloo")
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=1)

    message = "has not sharded the model and would average no gradients"
    # Lightning sets variables of ranks, which other tests must not see.
    with mock.patch.dict(os.environ), pytest.raises(UserError, match=message):
        trainer.fit(tiny(GPT), batches(4, 16))

    distributed.destroy_process_group()
