"""The LightningModule under the three architectures: next-token loss, optimizer, and the norms after each step."""

import inspect
import logging
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

import anlit
from anlit.checkpoints.weights import refuse_non_finite, refuse_other_shapes
from anlit.config.objects import made_real, to_plain_values
from anlit.config.schema import check_precision, check_ranges
from anlit.errors import UserError
from anlit.nn.attention.attention import attention_layers
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.layers.positions import NoPE
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.sharded import full_tensor
from anlit.nn.mechanisms.warm_start import grow, warm_starts
from anlit.nn.models.config import DecoderConfig
from anlit.nn.models.runtime import allow_compiled_kernels, repays_compiled_blocks
from anlit.training import resume_checks
from anlit.training.kept_checkpoints import with_names, with_own_paths
from anlit.training.lightning_internals import completes_step, is_logged, is_made_by_cli, trainer_of
from anlit.training.mean_loss import MeanLoss
from anlit.training.optim.optimizers import OptimizerFactory, parameter_groups
from anlit.training.optim.schedule import Schedule
from anlit.training.optim.step_loss import StepLoss

NO_TARGET_FIX = "give longer documents, or set data.score_first_token: true"
_log = logging.getLogger(__name__)


class LanguageModel(L.LightningModule):
    """Trains `self.model`, the decoder that `decoder_class` makes of `config`. It has all parameters.

    `optimizer` is called with `parameter_groups(self.model)`; `schedule` is over the run's optimizer steps.
    """

    accept_changes = False
    """Whether a run may continue from a checkpoint with a changed model, optimizer or seed."""
    family: str | None = None
    """transformers' model_type of the checkpoint that the first weights were imported from."""
    family_length: int | None = None
    """That checkpoint's context length."""
    text_folder: Path | None = None
    """The folder with the tokenizer of the checkpoint that a new run's weights come from."""
    is_continued = begins_new_optimizer = False
    """Whether the run continues from a checkpoint, and whether it does so without the optimizer's state."""
    changed_settings: tuple[str, ...] = ()
    """Settings that differ from those of the checkpoint that the run continues from, as `name old → new`."""

    def __init__(
        self, decoder_class: Callable[[Any], Any], config: DecoderConfig, optimizer: OptimizerFactory,
        schedule: Schedule,
    ) -> None:  # fmt: skip
        for name, part in (("optimizer", optimizer), ("schedule", schedule)):
            if part is None:
                raise UserError(f"model.{name} is empty: leave it out for the default")
        schedule = made_real(schedule)
        super().__init__()
        self.save_hyperparameters(ignore=["decoder_class", "config"], logger=False)
        if not is_made_by_cli(self):  # built in Python: save default settings too
            self.hparams.update(vars(config))
        assert config.vocab_size is not None  # the configuration refuses it
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.z_loss, self.schedule = config.z_loss, schedule
        # A function, which a copy of the model shares: the parser's partial cannot be copied.
        self.make_optimizer: OptimizerFactory = lambda groups: optimizer(groups)
        self.mean_loss = MeanLoss()
        self.runtime = config.runtime
        self._is_compiled: bool | None = None  # None: not prepared to run
        self.step_loss = StepLoss()
        with config.runtime.device():
            self.model = decoder_class(config)

    def configure_model(self) -> None:
        """Prepare the decoder to run. A strategy shards it afterwards.

        Without a Trainer, when a checkpoint is loaded, this only draws missing weights.
        """
        if trainer_of(self) is None:
            self.model.draw_missing(torch.device("cpu"))
            return
        device = self.trainer.strategy.root_device
        if self._is_compiled is None:
            self.runtime.prepare(self.model, device.type)
        compiles = self._is_compiled or self._repays_compilation(device.type)
        if compiles != self._is_compiled:
            self.runtime.wrap_blocks(self.model, device.type, compiles)
            self._is_compiled = compiles
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            self.model.draw_missing(device)

    def _repays_compilation(self, device_type: str) -> bool:
        """Whether the Trainer's run takes longer than to compile the blocks; attention's kernels are told the same."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            for layer in attention_layers(self.model):
                layer.allow_compilation(True)
            return self.runtime.compiles_on(device_type)
        split = "test" if self.trainer.state.fn == TrainerFn.TESTING else "val"
        size = getattr(self._data(), "evaluation_size", None)
        n_tokens, length = (0, self.context_length) if size is None else size(split)
        allow_compiled_kernels(self.model, n_tokens, length)
        is_large = repays_compiled_blocks(self.model, n_tokens, length)
        return is_large and self.runtime.compiles_on(device_type)

    def forward(
        self, tokens: Tensor, document_ids: Tensor | None = None, cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:  # fmt: skip
        """tokens (B, T) → logits (B, T, V); for the arguments on packed documents see `Decoder.forward`."""
        return self.model(tokens, document_ids, cu_seqlens, longest)

    def loss_of(self, batch: Any, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """Mean loss of a `Batch` in nats per counted token, and the objective to differentiate, with the z-loss."""
        packing = batch.document_ids, batch.cu_seqlens, batch.longest
        return self.model(batch.tokens, *packing, targets=batch.targets, z_loss=z_loss)

    def on_fit_start(self) -> None:
        check_precision(self.trainer.precision)
        is_sharded = isinstance(self.model, FSDPModule)
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not is_sharded:
            raise UserError(
                f"{type(self.trainer.strategy).__name__} has not sharded the model and would average no gradients: "
                "give anlit.FullySharded as the strategy"
            )
        self._warn_of_doubled_positions()

    def _warn_of_doubled_positions(self) -> None:
        """Say that a mechanism such as ALiBi, published without positions, is combined with others."""
        for block in self.model.blocks:
            parts = block.attention.mechanism.modules()
            names = [
                type(part).__name__ for part in parts if getattr(part, "replaces_positions", 0)
            ]
            if names and not isinstance(block.positions, NoPE):
                kept = f"{names[0]} is published without positions, and this model has"
                rank_zero_only(_log.warning)(
                    f"{kept} {type(block.positions).__name__} too: leave them out with "
                    "--model.positions NoPE"
                )
                return

    def on_train_start(self) -> None:
        """Assume that batches of an unknown data module may count different numbers of tokens."""
        counts_vary = not getattr(self._data(), "counts_every_target", False)
        self.step_loss = StepLoss(counts_vary, self.context_length)
        self._warm_starts = warm_starts(self.model)
        if self.changed_settings:
            listed = ", ".join(self.changed_settings)
            rank_zero_only(_log.info)(
                f"Continued with changed settings, the new ones are used: {listed}"
            )
        if self.is_continued:
            self._take_configured_rates()

    def _take_configured_rates(self) -> None:
        """Go on with the rates of the configuration; say it where they differ from the checkpoint's."""
        optimizer = self.trainer.optimizers[0]
        scheduler: Any = self.lr_schedulers()
        before = optimizer.param_groups[0]["lr"]
        resume_checks.take_group_settings(optimizer, scheduler, self._configured_groups)
        after = optimizer.param_groups[0]["lr"]
        if not math.isclose(before, after, rel_tol=1e-6) and not self.begins_new_optimizer:
            step = self.trainer.global_step + 1
            rank_zero_only(_log.info)(
                f"The learning rate of step {step} is {after:.3g}, and by the checkpoint's settings "
                f"it would be {before:.3g}"
            )

    def peak_rates(self) -> dict[str, float]:
        """The peak learning rate of each parameter group, also where its setting is null."""
        rates = {}
        for number, group in enumerate(self._configured_groups):
            rates[group.get("name", str(number))] = float(group["lr"])
        return rates

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logs the loss of the whole step at its last micro-batch, and before that the loss of the micro-batch."""
        loss, objective = self.loss_of(batch, self.z_loss)
        loss = loss.detach()
        objective = self.step_loss.add(loss, objective, batch.targets)
        if completes_step(self.trainer):
            loss = self.step_loss.finish(self.trainer.accumulate_grad_batches)
            if not self.step_loss.counts_vary and is_logged(
                self.trainer, self.trainer.global_step + 1
            ):
                loss = self.trainer.strategy.reduce(loss.clone(), reduce_op="mean")
        # With `sync_dist` or `prog_bar` every step would wait for the device.
        self.log("train/loss", loss)
        self._loss = loss
        return objective

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        grow(self._warm_starts, self.trainer.global_step + 1)

    def on_train_end(self) -> None:
        if self.step_loss.has_no_target():
            raise UserError(f"no token of training counted in the loss: {NO_TARGET_FIX}")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.loss_of(batch)
        self.mean_loss.update(loss, (batch.targets != IGNORE_INDEX).sum())

    def on_validation_epoch_end(self) -> None:
        self._log_mean_loss("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_mean_loss("test")

    def _log_mean_loss(self, split: str) -> None:
        loss, n_targets = self.mean_loss.compute()
        self.mean_loss.reset()
        if not n_targets:
            raise UserError(
                f"no token that was read of the {split} split counts in the loss: {NO_TARGET_FIX}"
            )
        self.log(f"{split}/loss", loss, prog_bar=True)
        self.log(f"{split}/perplexity", loss.exp())
        data = self._data()
        if data is not None and (bytes_per_token := data.bytes_per_token(split)) is not None:
            self.log(f"{split}/bits_per_byte", loss / math.log(2) / bytes_per_token)

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self.model)
        try:
            optimizer = self.make_optimizer(groups)
        except (ValueError, TypeError) as error:
            raise UserError(f"model.optimizer: {error}") from error
        self._configured_groups = resume_checks.group_settings(optimizer)
        n_steps = (
            self.trainer.max_steps
            if self.trainer.max_steps > 0
            else self.trainer.estimated_stepping_batches
        )
        if n_steps == math.inf:
            raise UserError(
                "trainer.max_steps=-1 leaves the run without a number of steps, which the schedule needs: "
                "set trainer.max_steps or trainer.max_epochs, also beside trainer.max_time"
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.schedule.factor(step, int(n_steps))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as the Trainer's settings say; log the global norm before clipping, and tell it to callbacks.

        A callback's `on_gradient_norm(trainer, pl_module, norm)` comes before the optimizer's step.
        """
        check_ranges("trainer.gradient_clip_val", gradient_clip_val)
        self.step_loss.scale_gradients(self.model.parameters())
        norm = _gradient_norm(self.model)
        if gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            clip_grads_with_norm_(self.model.parameters(), gradient_clip_val, norm)
        norm = full_tensor(norm)
        self.log("train/grad_norm", norm)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_gradient_norm"):
                callback.on_gradient_norm(self.trainer, self, norm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take the step, restore the norms, and log the step's rate and loss.

        Both are logged together: at an epoch's first batch, a hook that logs a second time after
        another hook resets what it logged before. Progress bars read the loss when the batch ends.
        """
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        try:
            super().optimizer_step(*args, **kwargs)
        except Exception as error:
            self._explain(error)
            raise
        # Lightning does this only after the next forward pass, with both its activations and these gradients in memory.
        self.trainer.optimizers[0].zero_grad()
        self.model.clip_qk()
        self.model.restore_norms()
        self.log("train/learning_rate", torch.as_tensor(rate))  # a number would wait for the device
        if self.device.type == "cpu" or is_logged(self.trainer, self.trainer.global_step + 1):
            self.log("loss", self._loss.cpu(), prog_bar=True, logger=False)

    def _explain(self, error: Exception) -> None:
        """Raise UserError for an error by which the code of an optimizer says what it needs.

        A mistake in that code, such as a KeyError, keeps its traceback.
        """
        is_said = isinstance(error, RuntimeError | ValueError) or type(error) is Exception
        if not is_said or isinstance(error, torch.OutOfMemoryError):
            return
        kind = type(self.trainer.optimizers[0])
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        if place == inspect.getfile(kind):
            raise UserError(
                f"model.optimizer={kind.__name__} cannot take its step ({error}): choose another, "
                "such as anlit.AdamW or torch.optim.SGD"
            ) from error

    def _data(self) -> Any:
        """The Trainer's data module; None without one, or without a Trainer."""
        return getattr(trainer_of(self), "datamodule", None)

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: Lightning would make any object that the file names."""
        raise UserError(
            "load_from_checkpoint makes objects of any class that the file names: use "
            "anlit.load_checkpoint(path).model, which makes only classes of anlit and of imported modules"
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "hyper_parameters" in checkpoint:
            checkpoint["hyper_parameters"] = to_plain_values(checkpoint["hyper_parameters"])
        if "callbacks" in checkpoint:
            checkpoint["callbacks"] = with_names(checkpoint["callbacks"], self.trainer)
        data = self._data()
        checkpoint["anlit"] = {
            "architecture": type(self).__name__,
            "version": anlit.__version__,
            "data": data.fingerprint if data is not None else None,
            "family": self.family,
            "family_length": self.family_length,
            "run": resume_checks.run_settings(self.trainer),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        record = checkpoint.get("anlit")
        if record is None:
            raise UserError(
                "ckpt_path names a checkpoint that anlit did not write: choose one from a run folder"
            )
        if record["architecture"] != type(self).__name__:
            raise UserError(
                f"the checkpoint in ckpt_path holds {record['architecture']}, but the configuration's model is "
                f"{type(self).__name__}: set --model {record['architecture']} or choose another checkpoint"
            )
        states = checkpoint.get("callbacks", {})
        checkpoint["callbacks"] = with_own_paths(states, trainer_of(self))  # read after this
        checkpoint["callbacks"].pop(
            "Timer", None
        )  # max_time is that of a launch, or no later one would train
        self.family, self.family_length = record.get("family"), record.get("family_length")
        data = self._data()
        then, now = record["data"], data.fingerprint if data is not None else None
        if then and now and then["tokenizer_sha256"] != now["tokenizer_sha256"]:
            raise UserError(
                f"the checkpoint in ckpt_path was trained with another tokenizer ({_short(then)}) than data.path's "
                f"shards have ({_short(now)}): set --data.path to the shards that it was trained on"
            )
        if trainer_of(self) is None:
            return
        if self.trainer.state.fn == "fit":
            self._continue_from(checkpoint)
        else:
            self._evaluate(checkpoint)

    def _changes_since(self, checkpoint: dict[str, Any]) -> dict[str, str]:
        """The settings that differ from the checkpoint's: dotted name → `name old → new`."""
        then = {
            "model": checkpoint.get("hyper_parameters", {}),
            **checkpoint["anlit"].get("run", {}),
        }
        now = {
            "model": to_plain_values(dict(self.hparams)),
            **resume_checks.run_settings(self.trainer),
        }
        return dict(resume_checks.changes(then, now))

    def _check_weights(self, checkpoint: dict[str, Any], changed: dict[str, str]) -> None:
        """UserError for changed settings that are not accepted, and for weights that do not fit.

        A strategy that loads the weights itself leaves them out.
        """
        path = self.trainer.ckpt_path
        if not self.accept_changes:
            resume_checks.check_changes(changed, path)
        averages = any(isinstance(each, WeightAveraging) for each in self.trainer.callbacks)  # type: ignore[attr-defined]
        if "averaging_state" in checkpoint and not averages:
            raise UserError(
                f"ckpt_path={path} has weights that a callback averages, and trainer.callbacks averages none: add the "
                f"callback of the run's config.yaml, or begin a run from the mean with --initial_weights {path}"
            )
        if "state_dict" in checkpoint:
            refuse_other_shapes(checkpoint["state_dict"], self.state_dict(), f"ckpt_path={path}")

    def _evaluate(self, checkpoint: dict[str, Any]) -> None:
        """Check that the model is the checkpoint's; how it was trained and on what does not count."""
        changed = self._changes_since(checkpoint)
        of_model = {
            name: text
            for name, text in changed.items()
            if name.startswith("model.") and not name.startswith("model.optimizer")
        }
        self._check_weights(checkpoint, of_model)
        weights = checkpoint.get("state_dict", {})
        refuse_non_finite(weights, f"ckpt_path={self.trainer.ckpt_path}")

    def _continue_from(self, checkpoint: dict[str, Any]) -> None:
        changed = self._changes_since(checkpoint)
        self._check_weights(checkpoint, changed)
        self.is_continued, self.changed_settings = True, tuple(changed.values())
        if "model.optimizer" in changed:
            self.begins_new_optimizer, checkpoint["optimizer_states"] = True, []


def _gradient_norm(model: nn.Module) -> Tensor:
    """The norm of all gradients, 0-d, in float32 at least."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if all(gradient.dtype == wide_dtype(gradient) for gradient in gradients):
        return get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(grad, dtype=wide_dtype(grad)) for grad in gradients]
    return get_total_norm(norms)


def _short(fingerprint: dict[str, Any]) -> str:
    """The beginning of the tokenizer's hash; none if the data came as tokens."""
    return f"{fingerprint['tokenizer_sha256'][:12]}…" if fingerprint["tokenizer_sha256"] else "none"
