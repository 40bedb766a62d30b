"""Which of Lightning's strategies, callbacks and settings a run may have; the tables have all that Lightning has."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from anlit import GPT
from anlit.errors import UserError
from anlit.training.support import check_strategy, check_trainer
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import batches, tiny

PAGES = ("scale-out.md", "lightning.md")
MODEL = {"class_path": "anlit.GPT"}
TAKEN_STRATEGIES = {
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
    """A user's own callback, whose name has a piece of a refused one's."""


class WeightAveragingReport(callbacks.Callback):
    """Another one."""


class OwnFinder(callbacks.LearningRateFinder):
    """Is one of the refused ones, under another name."""


class OwnEMA(callbacks.EMAWeightAveraging):
    """A mean of weights under another name."""


class OwnDDP(DDPStrategy):
    """A user's own strategy."""


class OwnModelParallel(ModelParallelStrategy):
    """A user's own strategy that shards nothing."""


def spec(kind: str, **settings: Any) -> dict[str, Any]:
    return {"class_path": kind, "init_args": settings}


def own(kind: type, **settings: Any) -> dict[str, Any]:
    return spec(f"{__name__}.{kind.__name__}", **settings)


def refusal_of(trainer: dict[str, Any], model: str = "GPT") -> str:
    """The sentence with which a configuration is refused; "" if it is taken."""
    try:
        check_trainer(trainer, spec(f"anlit.{model}"))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", StrategyRegistry)
def test_every_strategy_of_lightning_is_taken_or_refused_with_a_fix(name: str) -> None:
    said = refusal_of({"strategy": name})
    if name in TAKEN_STRATEGIES:
        assert said == ""
    else:
        assert said.startswith(f"trainer.strategy={name} ")
        assert ": set " in said


@pytest.mark.parametrize(("strategy", "says"), [
    ("auto", ""),
    ("nonesuch", r"trainer.strategy=nonesuch is not known: choose auto, ddp or anlit.FullySharded"),
    (spec("anlit.FullySharded"), ""),
    (spec("lightning.pytorch.strategies.DDPStrategy", gradient_as_bucket_view=True), ""),
    (spec("lightning.pytorch.strategies.DDPStrategy", static_graph=True), "static_graph fails inside torch"),
    (spec("lightning.pytorch.strategies.DDPStrategy", start_method="fork"), "a signal to the command"),
    (spec("lightning.pytorch.strategies.DDPStrategy", model_averaging_period=2), "model_averaging_period changes"),
    (spec("lightning.pytorch.strategies.ModelParallelStrategy"), "would average no gradients"),
    (own(OwnDDP), ""),
    (own(OwnModelParallel), "OwnModelParallel does not shard"),
    (spec("lightning.pytorch.strategies.Strategy"), "derive it from DDPStrategy"),
])  # fmt: skip
def test_a_strategy_by_its_class_is_taken_or_refused(strategy: Any, says: str) -> None:
    said = refusal_of({"strategy": strategy})
    assert (said == "") if says == "" else (says in said)


@pytest.mark.parametrize("name", callbacks.__all__)
def test_every_callback_of_lightning_is_taken_or_refused_with_a_fix(name: str) -> None:
    said = refusal_of({"callbacks": [spec(f"lightning.pytorch.callbacks.{name}")]})
    if name in REFUSED_CALLBACKS:
        assert said.startswith(f"trainer.callbacks has {name}, which ")
        assert ": " in said
    else:
        assert said == ""


@pytest.mark.parametrize(("callback", "model", "says"), [
    (own(PathFinderLogger), "AnGPT", ""),
    (own(WeightAveragingReport), "NGPT", ""),
    (own(OwnFinder), "GPT", "has OwnFinder, which takes steps that are not the run's"),
    (own(OwnEMA), "GPT", ""),
    (own(OwnEMA), "NGPT", "has OwnEMA, which would make weight rows of NGPT shorter than their norm"),
    (own(OwnEMA), "AnGPT", "weight rows of AnGPT"),
    (spec("lightning.pytorch.callbacks.ModelCheckpoint", save_on_exception=True), "GPT", "save_on_exception=true"),
    (spec("lightning.pytorch.callbacks.ModelCheckpoint", save_on_exception=False), "GPT", ""),
])  # fmt: skip
def test_a_callback_is_judged_by_its_class_and_not_by_its_name(
    callback: dict[str, Any], model: str, says: str
) -> None:
    for given in (callback, [callback]):
        said = refusal_of({"callbacks": given}, model)
        assert (said == "") if says == "" else (says in said)


def test_a_mean_of_sharded_weights_is_refused() -> None:
    trainer = {"strategy": spec("anlit.FullySharded"), "callbacks": [own(OwnEMA)]}
    assert "cannot average sharded weights: set --trainer.strategy ddp" in refusal_of(trainer)


@pytest.mark.parametrize(("trainer", "says"), [
    ({"barebones": True}, "trainer.barebones=true turns off checkpoints"),
    ({"enable_checkpointing": False}, "trainer.enable_checkpointing=false leaves nothing to continue from"),
    ({"default_root_dir": "there"}, "trainer.default_root_dir=there would not be used"),
    ({"model_registry": "a/b"}, "trainer.model_registry=a/b would upload"),
    ({"plugins": [spec("lightning.pytorch.plugins.AsyncCheckpointIO")]}, "has AsyncCheckpointIO, which would write"),
    ({"plugins": spec("lightning.pytorch.plugins.TorchCheckpointIO")}, "has TorchCheckpointIO"),
    ({"plugins": [spec("lightning.pytorch.plugins.TorchSyncBatchNorm")]}, ""),
    ({"barebones": False, "enable_checkpointing": None, "callbacks": None, "plugins": None}, ""),
])  # fmt: skip
def test_a_setting_without_which_no_run_is_left_is_refused(
    trainer: dict[str, Any], says: str
) -> None:
    said = refusal_of(trainer)
    assert (said == "") if says == "" else (says in said)


def test_what_auto_chooses_in_a_notebook_is_refused() -> None:
    with pytest.raises(UserError, match="DDPStrategy starts ranks that a signal"):
        check_strategy("DDPStrategy", DDPStrategy, {"start_method": "fork"})


def test_the_pages_name_every_strategy_callback_and_setting() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "".join((docs / page).read_text() for page in PAGES)
    named = [*StrategyRegistry, *callbacks.__all__, *inspect.signature(L.Trainer).parameters]
    launched = (
        "spawn",
        "fork",
        "notebook",
    )  # two more names for each, which the page puts together
    named = [
        name for name in named if not name.startswith(tuple(f"ddp_{way}_" for way in launched))
    ]
    assert [name for name in named if f"`{name}`" not in text] == []


def test_a_strategy_that_shards_nothing_is_refused_in_python(tmp_path: Path) -> None:
    strategy = ModelParallelStrategy(1, 1, process_group_backend="gloo")
    loader = batches(4, 16)
    with pytest.raises(UserError, match="has not sharded the model and would average no gradients"):
        quiet_trainer(strategy=strategy, devices=1, max_steps=1).fit(tiny(GPT), loader)
