"""Averages of a run's weights, which are validated, saved and exported in the weights' place.

A callback derived from Lightning's `WeightAveraging` is a rule. It says after which steps the
averages take in the weights. It also gives the function. `WeightAverages` follows the rule:

    average ← function(average, weight, n)    the first average is the weight itself
    average ← restore_norms(average)          as after an optimizer step: nGPT's and anGPT's vectors

Lightning would keep a copy of the whole module. It is on the host, in the precision of the weights.
Here the averages are beside the weights and sharded like them. They are in float32 at least.
"""

import logging
from collections.abc import Iterable, Mapping
from operator import methodcaller
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from anlit.checkpoints.averages import AVERAGES, CURRENT, STATE
from anlit.errors import UserError
from anlit.nn.layers.norms import restore_norms
from anlit.nn.layers.precision import wide_dtype
from anlit.nn.layers.sharded import fill, local_tensor, reshard
from anlit.training.lightning_internals import (
    averaging_device,
    averaging_functions,
    callbacks_of_class,
    completes_step,
)

Tensors = Mapping[nn.Parameter, Tensor]
_log = logging.getLogger(__name__)


def keep_averages(trainer: L.Trainer) -> None:
    """Replace the Trainer's rule, if any, by the `WeightAverages` that follow it."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    rules = callbacks_of_class(trainer, WeightAveraging)
    refuse_two_averages(map(type, rules))
    for rule in rules:
        callbacks[callbacks.index(rule)] = WeightAverages(rule)


def refuse_two_averages(classes: Iterable[type]) -> None:
    """Raise UserError if two of a Trainer's classes of callbacks average its weights."""
    names = [kind.__name__ for kind in classes if issubclass(kind, WeightAveraging)]
    if len(names) > 1:
        raise UserError(
            f"trainer.callbacks has {names[0]} and {names[1]}, and a run has one average of its "
            "weights: leave one out"
        )


def averages_of(trainer: L.Trainer) -> "WeightAverages | None":
    """The averages that a Trainer keeps, if any."""
    return next(iter(callbacks_of_class(trainer, WeightAverages)), None)


class WeightAverages(L.Callback):
    """Keeps the averages of a run's weights. Validation has them in the weights' place.

    They are there after training too. Buffers are not averaged. A weight that two modules share has
    one average. Before the first average there are the weights alone.

    Args:
        rule: Says when and how the averages change. Its hook `on_train_start` is called. A
            `first_step` is the first step that may be in the averages.
    """

    def __init__(self, rule: WeightAveraging) -> None:
        self.rule = rule
        self.n_averaged = 0
        """The steps whose weights are in the averages."""
        self.first_step = 0
        """The first of these steps, from 0."""
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._weights: dict[nn.Parameter, Tensor] = {}
        """The weights, while the averages are in their place."""
        self._saved: dict[str, Any] = {}
        """The entries of the checkpoint that the run continues from."""

    @property
    def name(self) -> str:
        """The class of the rule."""
        return type(self.rule).__name__

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.n_averaged = 0
        self._saved = {}
        if AVERAGES in checkpoint and trainer.state.fn == "fit":
            self._saved = {key: checkpoint[key] for key in (AVERAGES, STATE)}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Make room for the averages, and load them from the checkpoint that the run continues."""
        _refuse_other_hook(pl_module.model)
        start = getattr(self.rule, "update_starting_at_step", None)
        refuse_late_start(start, n_steps_of(trainer))
        self.rule.on_train_start(trainer, pl_module)
        reshard(pl_module)
        device = averaging_device(self.rule)
        self.n_averaged = 0
        self._weights = {}
        self._averages = {}
        for weight in pl_module.parameters():
            self._averages[weight] = _room_for(weight, device)
        saved, self._saved = self._saved, {}
        if saved and saved[STATE].get("first_step", 0) >= getattr(self.rule, "first_step", 0):
            self._restore(pl_module, saved)

    @torch.no_grad()
    def _restore(self, pl_module: L.LightningModule, saved: dict[str, Any]) -> None:
        self.n_averaged = int(saved[STATE]["n_averaged"])
        self.first_step = int(saved[STATE].get("first_step", 0))
        for name, weight in pl_module.named_parameters():
            average = self._averages[weight]
            values = saved[AVERAGES][name]
            if isinstance(values, DTensor):
                local_tensor(average).copy_(local_tensor(values))
            else:
                fill(average, methodcaller("copy_", values))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step - 1
        if completes_step(trainer) and self.rule.should_update(step_idx=step):
            self._take_in(pl_module.model, step)

    @torch.no_grad()
    def _take_in(self, model: Any, step: int) -> None:
        """Let the averages take in the weights after a step, and restore their norms."""
        reshard(model)  # another callback may have used the model
        averages = [local_tensor(average) for average in self._averages.values()]
        weights: list[Tensor] = []
        for weight, average in zip(self._averages, averages, strict=True):
            weights.append(local_tensor(weight.detach()).to(average))
        if self.n_averaged == 0:
            self.first_step = step
            torch._foreach_copy_(averages, weights)
        else:
            _move(averages, weights, self.n_averaged, **averaging_functions(self.rule))
        constraints = []
        for weight, dim, norms in model.constraints():
            constraints.append((self._averages[weight], dim, norms))
        if constraints:
            restore_norms(constraints, model.compiles_norms)
        self.n_averaged += 1

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._put_in(pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._put_back(pl_module)
            n_averaged = torch.tensor(float(self.n_averaged))  # kept on the host
            pl_module.log("val/averaged_steps", n_averaged)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the averages in the model, for those who use it after `trainer.fit`."""
        self._put_in(pl_module)
        if self.n_averaged == 0:
            rank_zero_only(_log.warning)(
                f"{self.name} has averaged no step: its should_update was true after none"
            )

    @torch.no_grad()
    def _put_in(self, pl_module: L.LightningModule) -> None:
        """Put the averages in the weights' place, if there are any."""
        if self.n_averaged == 0 or self._weights:
            return
        reshard(pl_module)
        for weight, average in self._averages.items():
            self._weights[weight] = weight.detach().clone()
            local_tensor(weight.detach()).copy_(local_tensor(average))

    @torch.no_grad()
    def _put_back(self, pl_module: L.LightningModule) -> None:
        """Put the weights back in their place."""
        reshard(pl_module)
        for weight, values in self._weights.items():
            local_tensor(weight.detach()).copy_(local_tensor(values))
        self._weights = {}

    def write(self, checkpoint: dict[str, Any], pl_module: L.LightningModule) -> None:
        """Put the averages into `state_dict`, and what continues the run into further entries.

        A checkpoint of weights alone has the averages alone. All ranks call this.
        """
        if self.n_averaged == 0:
            return
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = _state_with(state, self._averages, pl_module)
        if "optimizer_states" not in checkpoint:
            return
        if self._weights:
            state = _state_with(state, self._weights, pl_module)
        checkpoint[CURRENT] = state
        checkpoint[STATE] = {
            "n_averaged": torch.tensor(self.n_averaged),  # a tensor, as Lightning has it
            "first_step": self.first_step,
        }


def _refuse_other_hook(model: nn.Module) -> None:
    """Refuse a decoder that restores norms by itself: its averages would keep no norm."""
    for kind in type(model).__mro__:
        if "restore_norms" in vars(kind):
            if "constraints" in vars(kind):
                return
            raise UserError(
                f"{kind.__name__} has a restore_norms of its own, which averages of weights cannot "
                "follow: define constraints in its place, or leave out the average"
            )


def refuse_late_start(start: int | None, n_steps: int) -> None:
    """Raise UserError if an average would begin, at step `start`, after the run's last step."""
    if start is not None and start >= n_steps:
        raise UserError(
            f"trainer.callbacks.update_starting_at_step={start} averages nothing, because the last "
            f"of the run's {n_steps} steps is number {n_steps - 1}: give a smaller one"
        )


def n_steps_of(trainer: L.Trainer) -> int:
    """The optimizer steps of a run."""
    return trainer.max_steps if trainer.max_steps > 0 else int(trainer.estimated_stepping_batches)


def _room_for(weight: Tensor, device: Any) -> Tensor:
    """A tensor for the average of a weight, without values; `device` None is the weight's."""
    if device is None:
        device = weight.device
    if isinstance(weight, DTensor) and torch.device(device).type != weight.device.type:
        raise UserError(
            f"trainer.callbacks.device={device} is not where anlit.FullySharded has its shards, "
            f"{weight.device.type}: leave it out"
        )
    return torch.empty_like(weight, dtype=wide_dtype(weight), device=device, requires_grad=False)


def _move(
    averages: list[Tensor],
    weights: list[Tensor],
    n_averaged: int,
    avg_fn: Any = None,
    multi_avg_fn: Any = None,
) -> None:
    """Move averages of `n_averaged` weights to further weights, by the functions of torch.

    They are the arguments of `torch.optim.swa_utils.AveragedModel`; the default is the mean.
    """
    if avg_fn is None:
        (multi_avg_fn or get_swa_multi_avg_fn())(averages, weights, n_averaged)
        return
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(avg_fn(average, weight, n_averaged))


def _state_with(
    state: dict[str, Any], tensors: Tensors, pl_module: L.LightningModule
) -> dict[str, Any]:
    """A state_dict from the strategy with `tensors` in place of the parameters, in the same form.

    The state is empty on ranks that save nothing.
    """
    reshard(pl_module)
    replaced = dict(state)
    for name, weight in pl_module.named_parameters(remove_duplicate=False):
        if name in state:
            replaced[name] = tensors[weight]
    return replaced
