"""The LightningModule of all architectures: loss, optimizer, and norms after each step."""

import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from anlit.config.batch_ramp import ramp_of
from anlit.config.object_checks import check_object
from anlit.config.objects import made_real
from anlit.config.value_checks import check_precision, check_ranges
from anlit.data.attributes import bytes_per_token_of, check_fits_model, fingerprint_of, name_of
from anlit.data.batch import Batch
from anlit.data.batch_forms import as_batch
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.nn.attention.attention import attention_layers
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.layers.positions import NoPE
from anlit.nn.layers.sharded import full_tensor, total_norm
from anlit.nn.mechanisms.warm_start import grow, warm_starts
from anlit.nn.models.config import DecoderConfig
from anlit.nn.models.runtime import allow_compiled_kernels, repays_compiled_blocks
from anlit.training.checkpoint_record import load_record, refuse_other_tokenizer, write_record
from anlit.training.data_messages import data_messages, refuse_other_batch
from anlit.training.devices import check_device_type
from anlit.training.lightning_internals import (
    HostBatches,
    completes_step,
    data_module_of,
    is_logged,
    is_made_by_cli,
    trainer_of,
)
from anlit.training.mean_loss import MeanLoss
from anlit.training.optim.optimizer_checks import (
    check_factory,
    explain_failed_step,
    refuse_wrong_kernel,
)
from anlit.training.optim.optimizers import (
    OptimizerFactory,
    name_default_optimizer,
    parameter_groups,
)
from anlit.training.optim.rates import (
    LRFactors,
    ScaledOptimizer,
    base_rate,
    check_lr_factors,
    rate_factors,
)
from anlit.training.optim.schedule import Schedule, ramped
from anlit.training.optim.step_loss import StepLoss
from anlit.training.resume_checks import apply_group_settings, group_settings
from anlit.training.subclasses import (
    refuse_replaced_hooks,
    refuse_untrained_parameters,
    settings_within,
)
from anlit.training.weight_averages import keep_averages

NO_TARGET_FIX = "give longer documents, or set data.score_first_token: true"
"""The fix in errors about data without a token that counts in the loss."""
OTHER_TOKENS = (
    "prepare the data with its tokenizer, --tokenizer RUN/tokenizer.json, or give "
    "--accept_changes true to learn the meaning of each token again"
)
"""The fix where the data of a new run have another tokenizer than its first weights."""
_log = logging.getLogger(__name__)


class LanguageModel(HostBatches):
    """Trains `self.model`, the decoder that `decoder_class` makes of `config`.

    The decoder has all parameters that are trained. `optimizer` is called with
    `parameter_groups(self.model)`. `schedule` counts the run's optimizer steps. `lr_factors`
    multiply the rates of the groups. A subclass calls `super()` in each hook that it overrides.
    """

    accept_changes = False
    """Whether a run may continue with a changed model, optimizer or seed."""
    family: str | None = None
    """transformers' model_type of the checkpoint that the first weights were imported from."""
    family_length: int | None = None
    """The context length of that checkpoint."""
    text_folder: Path | None = None
    """The folder with the tokenizer of the checkpoint that a new run's weights come from."""
    begun_from: str | None = None
    """`initial_weights.identity_of` the weights that the run began from. None if it drew them."""
    initial_data: dict[str, Any] | None = None
    """The fingerprint of the data that those weights were trained on, in the launch that reads
    them."""
    is_continued = False
    """Whether the run continues from a checkpoint."""
    begins_new_optimizer = False
    """Whether the run continues without the optimizer's state."""
    changed_settings: tuple[str, ...] = ()
    """Settings that differ from the continued checkpoint's, as `name old → new`."""
    budget_batch: tuple[int, int] | None = None
    """Sequences and tokens of a micro-batch in a run with a budget of tokens."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        name_default_optimizer(cls)

    def __init__(
        self,
        decoder_class: Callable[[Any], Any],
        config: DecoderConfig,
        optimizer: OptimizerFactory,
        schedule: Schedule,
        lr_factors: LRFactors | None = None,
    ) -> None:
        refuse_replaced_hooks(type(self), LanguageModel)
        _refuse_empty("optimizer", optimizer)
        _refuse_empty("schedule", schedule)
        check_lr_factors(lr_factors or {})
        schedule = made_real(schedule)
        check_object("model.schedule", schedule, Schedule)
        check_factory(optimizer)
        super().__init__()
        with warnings.catch_warnings():
            # Lightning advises to leave modules such as `positions` out; they are settings here.
            warnings.filterwarnings("ignore", ".*is an instance of `nn.Module`.*")
            self.save_hyperparameters(ignore=["decoder_class", "config"], logger=False)
        if not is_made_by_cli(self):  # built in Python: save default settings too
            self.hparams.update(vars(config))
            self.hparams.pop("optimizer", None)  # a function, which no file can hold
            for name in settings_within(type(self), self.hparams):
                del self.hparams[name]
        for name, value in vars(config).items():
            if name in self.hparams and self.hparams[name] is None:
                self.hparams[name] = value  # the number that null stands for
        assert config.vocab_size is not None  # the configuration refuses it
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.z_loss = config.z_loss
        self.schedule = schedule
        self.mean_loss = MeanLoss()
        self.runtime = config.runtime
        self._is_compiled: bool | None = None  # None: not prepared to run
        self.step_loss = StepLoss()
        with config.runtime.device():
            self.model = decoder_class(config)
        self.lr_factors = dict(lr_factors or {})
        self.make_optimizer: OptimizerFactory = ScaledOptimizer(
            optimizer, self.lr_factors, self.model.transfer
        )

    @property
    def data_module(self) -> Any:
        """The Trainer's data module; None without a data module or a Trainer."""
        return data_module_of(trainer_of(self))

    def configure_callbacks(self) -> list[L.Callback]:
        """Let anlit keep the averages of weights that a callback of Lightning asks for."""
        keep_averages(self.trainer)
        return []

    def setup(self, stage: str) -> None:
        """Raise UserError for another device, or data of another size or tokenizer."""
        check_device_type("trainer.accelerator", self.trainer.strategy.root_device.type)
        check_fits_model(self.data_module, self, trains=stage == "fit")
        if not self.accept_changes:
            refuse_other_tokenizer(
                self.initial_data, fingerprint_of(self.data_module), "initial_weights", OTHER_TOKENS
            )

    def on_host_batch(self, batch: Any) -> Batch:
        """Return the `Batch` of a batch in any form of `as_batch`.

        Raises UserError if it does not fit the model, or the budget of tokens.
        """
        data = self.data_module
        if isinstance(data, TokenShards):
            return batch
        source = name_of(data)
        batch = as_batch(batch, source, self.vocab_size)
        length = batch.tokens.shape[1]
        if self.trainer.training:
            if length > self.context_length:
                raise UserError(
                    f"{source} delivers rows of {length} tokens, and "
                    f"model.context_length={self.context_length}: set --model.context_length "
                    f"{length}, or give shorter rows"
                )
            refuse_other_batch(self.budget_batch, batch, source)
            self.budget_batch = None  # later batches may be shorter
        return batch

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
            # Lightning converts after it has loaded a checkpoint, whose float64 would be rounded.
            self.trainer.precision_plugin.convert_module(self)

    def _repays_compilation(self, device_type: str) -> bool:
        """Whether the run takes longer than compiling blocks; tells attention kernels too."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            for layer in attention_layers(self.model):
                layer.allow_compilation(True)
            return self.runtime.compiles_on(device_type)
        split = "test" if self.trainer.state.fn == TrainerFn.TESTING else "val"
        evaluation_size = getattr(self.data_module, "evaluation_size", None)
        if evaluation_size is None:
            n_tokens, length = 0, self.context_length
        else:
            n_tokens, length = evaluation_size(split)
        allow_compiled_kernels(self.model, n_tokens, length)
        is_large = repays_compiled_blocks(self.model, n_tokens, length)
        return is_large and self.runtime.compiles_on(device_type)

    def forward(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:
        """tokens (B, T) → logits (B, T, V). `Decoder.forward` explains the other arguments."""
        return self.model(tokens, document_ids, cu_seqlens, longest)

    def loss_of(self, batch: Any, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """Compute the loss and the objective of a `Batch`, both 0-d.

        The loss is the mean in nats per counted token. The objective is the loss with the z-loss,
        and is the tensor to differentiate.
        """
        packing = batch.document_ids, batch.cu_seqlens, batch.longest
        if self._has_documents_as_rows(batch):
            packing = None, None, None  # plain causal attention, which needs no masks
        return self.model(batch.tokens, *packing, targets=batch.targets, z_loss=z_loss)

    def _has_documents_as_rows(self, batch: Batch) -> bool:
        """Whether each row of a user's data is a document. The host knows the shapes."""
        if trainer_of(self) is None or isinstance(self.data_module, TokenShards):
            return False
        return len(batch.cu_seqlens) == len(batch.tokens) + 1

    def on_fit_start(self) -> None:
        check_precision(self.trainer.precision)
        is_sharded = isinstance(self.model, FSDPModule)
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not is_sharded:
            raise UserError(
                f"{type(self.trainer.strategy).__name__} has not sharded the model and would "
                "average no gradients: give anlit.FullySharded as the strategy"
            )
        self._warn_of_doubled_positions()

    def _warn_of_doubled_positions(self) -> None:
        """Warn if a mechanism published without positions, such as ALiBi, has positions."""
        for block in self.model.blocks:
            if isinstance(block.positions, NoPE):
                continue
            for module in block.attention.mechanism.modules():
                if getattr(module, "replaces_positions", False):
                    mechanism = type(module).__name__
                    positions = type(block.positions).__name__
                    rank_zero_only(_log.warning)(
                        f"{mechanism} is published without positions, and this model has "
                        f"{positions} too: leave them out with --model.positions NoPE"
                    )
                    return

    def on_train_start(self) -> None:
        """Prepare the loss, warm starts and rates.

        Batches of an unknown data module may count different numbers of tokens.
        """
        counts_vary = not getattr(self.data_module, "counts_every_target", False)
        self.step_loss = StepLoss(counts_vary, self.context_length)
        self._warm_starts = warm_starts(self.model)
        if self.changed_settings:
            changes = ", ".join(self.changed_settings)
            rank_zero_only(_log.info)(
                f"Continued with changed settings, the new ones are used: {changes}"
            )
        for message in data_messages(self.trainer, self.is_continued):
            rank_zero_only(_log.info)(message)
        if self.is_continued:
            self._apply_configured_rates()

    def _apply_configured_rates(self) -> None:
        """Continue with the configured rates; log them if they differ from the checkpoint's."""
        optimizer = self.trainer.optimizers[0]
        scheduler: Any = self.lr_schedulers()
        saved_rate = optimizer.param_groups[0]["lr"]
        apply_group_settings(optimizer, scheduler, self._configured_groups)
        rate = optimizer.param_groups[0]["lr"]
        if not math.isclose(saved_rate, rate, rel_tol=1e-6) and not self.begins_new_optimizer:
            step = self.trainer.global_step + 1
            rank_zero_only(_log.info)(
                f"The learning rate of step {step} is {rate:.3g}, and by the checkpoint's settings "
                f"it would be {saved_rate:.3g}"
            )

    def peak_rates(self) -> dict[str, float]:
        """The peak learning rate by parameter group, also where the setting is null."""
        rates = {}
        for number, group in enumerate(self._configured_groups):
            rates[group.get("name", str(number))] = float(group["lr"])
        return rates

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.step_loss.begin_micro_batch()
        grow(self._warm_starts, self.trainer.global_step + 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the objective of a micro-batch, a mean over counted tokens, and log a loss.

        The last micro-batch of a step logs the step's loss. Others log their own loss.
        """
        loss, objective = self.loss_of(batch, self.z_loss)
        loss = loss.detach()
        self.step_loss.add(loss, batch.targets)
        if completes_step(self.trainer):
            loss = self.step_loss.finish(self.trainer.accumulate_grad_batches)
            step = self.trainer.global_step + 1
            if not self.step_loss.counts_vary and is_logged(self.trainer, step):
                loss = self.trainer.strategy.reduce(loss.clone(), reduce_op="mean")
        # With `sync_dist` or `prog_bar` every step would wait for the device.
        self.log("train/loss", loss)
        self._loss = loss
        return objective

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate what `training_step` returned, weighed by the counted tokens."""
        super().backward(self.step_loss.weigh(loss), *args, **kwargs)

    def on_train_end(self) -> None:
        if self.step_loss.has_no_target():
            raise UserError(f"no token of training counted in the loss: {NO_TARGET_FIX}")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, _ = self.loss_of(batch)
        self.mean_loss.add(loss, (batch.targets != IGNORE_INDEX).sum())

    def on_validation_epoch_end(self) -> None:
        self._log_mean_loss("val")

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._log_mean_loss("test")

    def _log_mean_loss(self, split: str) -> None:
        loss, n_targets = self.mean_loss.take(self.trainer.strategy)
        if not n_targets:
            raise UserError(
                f"no token that was read of the {split} split counts in the loss: {NO_TARGET_FIX}"
            )
        self.log(f"{split}/loss", loss, prog_bar=True)
        self.log(f"{split}/perplexity", loss.exp())
        bytes_per_token = bytes_per_token_of(self.data_module, split)
        if bytes_per_token is not None:
            self.log(f"{split}/bits_per_byte", loss / math.log(2) / bytes_per_token)

    def new_optimizer(self) -> Optimizer:
        """Return an optimizer of the weights. Raises UserError if its class refuses a setting."""
        try:
            return self.make_optimizer(parameter_groups(self.model))
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(f"model.optimizer: {error}") from error

    def configure_optimizers(self) -> Any:
        refuse_untrained_parameters(self)
        optimizer = self.new_optimizer()
        refuse_wrong_kernel(optimizer)
        self._configured_groups = group_settings(optimizer)
        self._rate_factors = rate_factors(optimizer, self.lr_factors, self.model.transfer)
        n_steps: float = self.trainer.max_steps
        if n_steps <= 0:
            n_steps = self.trainer.estimated_stepping_batches
        if n_steps == math.inf:
            raise UserError(
                "trainer.max_steps=-1 leaves the run without a number of steps, which the "
                "schedule needs: set trainer.max_steps or trainer.max_epochs, also beside "
                "trainer.max_time"
            )
        schedule = ramped(self.schedule, ramp_of(self.trainer))
        # A partial's state is {}, a function's None: LambdaLR loads either into either.
        scheduler = LambdaLR(optimizer, partial(schedule.factor, n_steps=int(n_steps)))
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
        """Clip by the Trainer's settings; log the global norm before, and tell it to callbacks.

        A callback's `on_gradient_norm(trainer, pl_module, norm)` comes before the optimizer's step.
        """
        check_ranges("trainer.gradient_clip_val", gradient_clip_val)
        self.step_loss.scale_gradients(self.model.parameters())
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norm = total_norm(gradients)
        if gradient_clip_val and gradient_clip_algorithm == "value":
            # Lightning's function refuses fused optimizers with bf16-mixed.
            clip_grad_value_(self.model.parameters(), gradient_clip_val)
        elif gradient_clip_val:
            clip_grads_with_norm_(self.model.parameters(), gradient_clip_val, norm)
        norm = full_tensor(norm)
        self.log("train/grad_norm", norm)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "on_gradient_norm"):
                callback.on_gradient_norm(self.trainer, self, norm)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take the step, restore the norms, and log the step's rate and loss.

        Both are logged together. At an epoch's first batch, a second logging of a hook would reset
        its first values. Progress bars read the loss when the batch ends.
        """
        rate = base_rate(self.trainer.optimizers[0], self._rate_factors)
        try:
            super().optimizer_step(*args, **kwargs)
        except Exception as error:
            explain_failed_step(self.trainer.optimizers[0], error)
            raise
        # Lightning frees the gradients only after the next forward pass, which needs much memory.
        self.trainer.optimizers[0].zero_grad()
        self.model.clip_qk()
        self.model.restore_norms()
        self.log("train/learning_rate", torch.as_tensor(rate))  # a number would wait for the device
        if self.device.type == "cpu" or is_logged(self.trainer, self.trainer.global_step + 1):
            self.log("loss", self._loss.cpu(), prog_bar=True, logger=False)

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: Lightning would make any object that the file names."""
        raise UserError(
            "load_from_checkpoint makes objects of any class that the file names: use "
            "anlit.load_checkpoint(path).model, which makes only classes of anlit and of imported "
            "modules"
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        write_record(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        load_record(checkpoint, self)


def _refuse_empty(name: str, setting: Any) -> None:
    if setting is None:
        raise UserError(f"model.{name} is empty: leave it out for the default")
