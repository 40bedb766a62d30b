"""Every checkpoint holds whole optimizer steps: a run that continues from it loses nothing."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import tree_leaves

from anlit import GPT, TokenShards
from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from anlit.errors import UserError
from anlit.training.callbacks import StepCheckpoints, WholeSteps
from anlit.training.lightning_internals import completes_step
from tests.data.modules import quiet_trainer
from tests.data.prepared import VOCABULARY, random_tokens, write_prepared
from tests.nn.models.tiny import tiny

MICRO_BATCHES = 3
STEPS = 8
VALIDATED_STEPS = [2, 4, 6, 8]
HOOKS_WITHIN_STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_gradient_norm",
    "on_train_batch_end",
)
HOOKS_ONCE_A_STEP = ("on_before_optimizer_step", "on_gradient_norm", "on_before_zero_grad")
HOOKS_IN_VALIDATION = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
)
HOOKS_BETWEEN_STEPS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
)

CurveAndWeights = tuple["Curve", dict[str, torch.Tensor]]


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


class Curve(L.Callback):
    """Keeps the loss of each step, and the validated steps; its state counts batches."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.validated: list[int] = []
        self.n_batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n_batches": self.n_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.n_batches = state_dict["n_batches"]

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.n_batches += 1
        if not completes_step(trainer):
            return
        self.losses[trainer.global_step] = float(trainer.callback_metrics["train/loss"])

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.validated.append(trainer.global_step)


class SavesIn(L.Callback):
    """Calls `trainer.save_checkpoint` in a hook, at its call number `call`, from 1."""

    def __init__(self, hook: str, call: int, path: Path) -> None:
        self.n_calls = 0
        self.call = call
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.n_calls += 1
        if self.n_calls == self.call:
            trainer.save_checkpoint(self.path)


class SavesInTransfer(TokenShards):
    """Data with a hook that saves when a batch is fetched and no callback has it."""

    path_of_checkpoint: Path
    call = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.call += self.trainer.training
        if self.call == 11 and self.trainer.training:
            self.trainer.save_checkpoint(self.path_of_checkpoint)
        return batch


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "shards"
    streams = {"train": random_tokens(5000, 1), "val": random_tokens(600, 2)}
    write_prepared(path, streams)
    return path


def train(
    shards: Path,
    *callbacks: L.Callback,
    ckpt_path: Path | None = None,
    data: type[TokenShards] = TokenShards,
    **settings: Any,
) -> CurveAndWeights:
    """Train eight steps of three micro-batches, validated after every second step."""
    curve = Curve()
    model = tiny(GPT, vocab_size=VOCABULARY, n_layers=1)
    defaults = {
        "max_steps": STEPS,
        "accumulate_grad_batches": MICRO_BATCHES,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "devices": 1,
        "plugins": [AtomicCheckpointIO()],
        "enable_checkpointing": True,
    }
    trainer = quiet_trainer(**defaults | settings, callbacks=[WholeSteps(), *callbacks, curve])
    datamodule = data(str(shards), batch_size=1)
    trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return curve, model.state_dict()


@pytest.fixture(scope="module")
def whole(shards: Path) -> CurveAndWeights:
    """The run without interruption."""
    return train(shards)


def assert_continues(shards: Path, path: Path, step: int, whole: CurveAndWeights) -> None:
    """The checkpoint is of `step`; continued, losses and weights equal `whole` to the bit."""
    content = read_checkpoint(path)
    assert content["global_step"] == step
    expected, expected_weights = whole

    curve, weights = train(shards, ckpt_path=path)

    validated_later = [number for number in VALIDATED_STEPS if number > step]
    assert curve.losses == losses_after(step, expected)
    assert curve.validated == validated_later
    assert curve.n_batches == expected.n_batches
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


def losses_after(step: int, curve: Curve) -> dict[int, float]:
    return {number: loss for number, loss in curve.losses.items() if number > step}


@pytest.mark.parametrize("call", [10, 11, 12])
def test_a_save_within_a_step_comes_after_it_and_after_its_validation(
    shards: Path, tmp_path: Path, whole: CurveAndWeights, call: int
) -> None:
    """Micro-batches 10 to 12 make step 4, and validation is due after it."""
    savers = []
    for hook in HOOKS_WITHIN_STEP:
        call_of_hook = 4 if hook in HOOKS_ONCE_A_STEP else call
        savers.append(SavesIn(hook, call_of_hook, tmp_path / f"{hook}.ckpt"))

    train(shards, *savers)

    assert_same_checkpoints(savers)
    assert_continues(shards, savers[0].path, 4, whole)


def test_a_save_in_a_validation_comes_after_it(
    shards: Path, tmp_path: Path, whole: CurveAndWeights
) -> None:
    savers = []
    for hook in HOOKS_IN_VALIDATION:
        call = 3 if "batch" in hook else 2  # in the validation after step 4
        savers.append(SavesIn(hook, call, tmp_path / f"{hook}.ckpt"))

    train(shards, *savers)

    assert_same_checkpoints(savers)
    assert_continues(shards, savers[0].path, 4, whole)


def assert_same_checkpoints(savers: list[SavesIn]) -> None:
    """All files have the same content, to the bit."""
    expected_tensors, expected_values = content_of(savers[0].path)
    for saver in savers[1:]:
        tensors, values = content_of(saver.path)
        torch.testing.assert_close(tensors, expected_tensors, rtol=0, atol=0)
        assert values == expected_values


def content_of(path: Path) -> tuple[list[torch.Tensor], list[Any]]:
    """All tensors of a checkpoint, and all other values."""
    tensors = []
    values = []
    for leaf in tree_leaves(read_checkpoint(path)):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:
            values.append(leaf)
    return tensors, values


def test_a_save_between_steps_is_written_at_once(
    shards: Path, tmp_path: Path, whole: CurveAndWeights
) -> None:
    savers = []
    for hook in HOOKS_BETWEEN_STEPS:
        savers.append(SavesIn(hook, 1, tmp_path / f"{hook}.ckpt"))

    train(shards, *savers)

    for hook, saver in zip(HOOKS_BETWEEN_STEPS, savers, strict=True):
        step = 0 if hook.endswith("start") else STEPS
        assert_continues(shards, saver.path, step, whole)


def test_a_save_while_a_batch_is_moved_comes_after_the_step(
    shards: Path, tmp_path: Path, whole: Any
) -> None:
    SavesInTransfer.path_of_checkpoint = tmp_path / "own.ckpt"

    train(shards, data=SavesInTransfer)

    assert_continues(shards, tmp_path / "own.ckpt", 4, whole)


@pytest.mark.parametrize("n_validated", [slow(0), 2])
def test_a_run_saved_at_the_ends_of_epochs_has_no_additional_epoch(
    shards: Path, tmp_path: Path, n_validated: int
) -> None:
    """Each of three launches trains an epoch of four steps."""
    epochs = {
        "max_epochs": 3,
        "max_steps": -1,
        "limit_train_batches": 12,
        "limit_val_batches": n_validated,
    }
    whole, whole_weights = train(shards, **epochs)
    first = tmp_path / "first.ckpt"
    second = tmp_path / "second.ckpt"

    train(shards, SavesIn("on_train_batch_end", 12, first), **epochs)
    saves_again = SavesIn("on_train_batch_end", 12, second)
    second_launch, _ = train(shards, saves_again, ckpt_path=first, **epochs)
    third_launch, weights = train(shards, ckpt_path=second, **epochs)

    assert second_launch.losses == losses_after(4, whole)
    assert third_launch.losses == losses_after(8, whole)
    assert len(whole.losses) == 12
    torch.testing.assert_close(weights, whole_weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"train_time_interval": timedelta(0)},
        slow({"every_n_train_steps": 1}),
        {"every_n_train_steps": 3},
    ],
    ids=["every moment", "every step", "every third step"],
)
def test_every_file_of_model_checkpoint_is_of_the_step_in_its_name(
    shards: Path, tmp_path: Path, whole: Any, settings: dict[str, Any]
) -> None:
    n_steps = settings.get("every_n_train_steps", 1)
    saved_steps = range(n_steps, STEPS + 1, n_steps)

    train(shards, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **settings))

    assert len(list(tmp_path.iterdir())) == len(saved_steps)
    for step in saved_steps:
        content = read_checkpoint(tmp_path / f"step={step}.ckpt")
        assert content["global_step"] == step
    assert_continues(shards, tmp_path / "step=3.ckpt", 3, whole)


@pytest.mark.parametrize("order", [1, -1])
def test_weights_alone_do_not_replace_a_file_that_continues_a_run(
    shards: Path, tmp_path: Path, whole: CurveAndWeights, order: int
) -> None:
    """An annealed study keeps its branches, and an arm may keep weights of the same steps."""
    savers = [StepCheckpoints([4]), StepCheckpoints(2, save_weights_only=True)]

    train(shards, *savers[::order], default_root_dir=str(tmp_path))

    files = {path.stem: path for path in tmp_path.rglob("*.ckpt")}
    weights = [f"weights-0000000{step}" for step in (2, 4, 6, 8)]
    assert sorted(files) == ["step-00000004", *weights]
    assert "optimizer_states" not in read_checkpoint(files["weights-00000002"])
    assert_continues(shards, files["step-00000004"], 4, whole)


class PassesAnHour(L.Callback):
    """Moves the clock of ModelCheckpoint by an hour within training batch number `batch`."""

    def __init__(self, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batch = batch
        self.seconds = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.seconds)
        monkeypatch.setattr("lightning.pytorch.callbacks.model_checkpoint.time", clock)

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch:
            self.seconds += 3600.0


def test_a_time_that_is_over_within_a_step_saves_that_step(
    shards: Path, tmp_path: Path, whole: Any, monkeypatch
) -> None:
    hourly = ModelCheckpoint(tmp_path, "{step}", train_time_interval=timedelta(hours=1))

    train(shards, hourly, PassesAnHour(10, monkeypatch))

    assert [file.name for file in tmp_path.iterdir()] == ["step=4.ckpt"]
    assert_continues(shards, tmp_path / "step=4.ckpt", 4, whole)


class FailsAt(L.Callback):
    """Raises at training batch number `batch`, and saves when the run has failed."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch = batch
        self.path = path

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            raise RuntimeError("the cable")

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_run_that_fails_within_a_step_saves_nothing_and_logs_a_line(
    shards: Path, tmp_path: Path, caplog
) -> None:
    path = tmp_path / "own.ckpt"

    with pytest.raises(RuntimeError, match="the cable"):
        train(shards, FailsAt(10, path))

    assert not path.exists()
    assert "own.ckpt is not written, because the run ended within step 4" in caplog.text


class ChangesAccumulation(L.Callback):
    """Acts like `GradientAccumulationScheduler`."""

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.accumulate_grad_batches = 1


def test_a_changed_accumulation_is_refused(shards: Path) -> None:
    with pytest.raises(UserError, match=r"accumulate_grad_batches from 3 to 1, and steps of a run"):
        train(shards, ChangesAccumulation())
