"""A run that is continued with other settings than its checkpoint's: what is refused, what is taken, and its taking.

Settings                                        On a change
model: its shape, heads, attention, positions …  refused, unless `accept_changes`: then the new ones are taken
optimizer's class                               refused, unless `accept_changes`: then it begins without a state
seed_everything                                 refused, unless `accept_changes`: the random states stay
learning rates, betas, weight decay, schedule,  the new ones are taken, from the next step on, and one line says so
dropout, z_loss, runtime, backend, Trainer's

So config.yaml, which is written when training begins, is what the run goes on with. The data module refuses other texts
or another order of them itself.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from anlit.errors import UserError

TAKEN = ("model.optimizer.", "model.schedule", "model.dropout", "model.z_loss", "model.runtime", "model.backend",
         "trainer.")  # fmt: skip
"""What the names of settings begin with that a run may change on its way; `model.optimizer` itself is its class."""


@dataclass(frozen=True)
class Change:
    """A setting that differs: its dotted name, its value in the checkpoint and now."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {_short(self.then)} → {_short(self.now)}"


def run_settings(trainer: L.Trainer) -> dict[str, Any]:
    """What a checkpoint records of a run beside the model's own settings."""
    seed = os.environ.get("PL_GLOBAL_SEED")  # where seed_everything leaves it
    names = ("max_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    values = {name: getattr(trainer, name) for name in names} | {"precision": str(trainer.precision)}
    return {"trainer": values, "seed_everything": int(seed) if seed is not None else None}


def changes(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[Change]:
    """The settings that differ; of a class that was replaced the class alone."""
    for key in [*then, *(key for key in now if key not in then)]:
        if key.startswith("_"):
            continue
        a, b = _plain(then.get(key)), _plain(now.get(key))
        if isinstance(a, dict) and isinstance(b, dict) and a.get("class_path") == b.get("class_path"):
            if "class_path" in a:
                a, b = a.get("init_args") or {}, b.get("init_args") or {}
            yield from changes(a, b, f"{prefix}{key}.")
        elif a != b:
            yield Change(prefix + key, a, b)


def check_changes(found: list[Change], ckpt_path: Any, accept: bool) -> str | None:
    """The line that tells what is taken, None if nothing has changed.

    Raises:
        UserError: What has changed would make another model or begin another run.
    """
    refused = [change for change in found if not change.name.startswith(TAKEN)]
    if refused and not accept:
        raise UserError(
            f"ckpt_path={ckpt_path} was trained with other settings ({_listed(refused)}): set them back as "
            "in the run's config.yaml, or give --accept_changes true to go on with the new ones"
        )
    return f"Continued with changed settings, the new ones are taken: {_listed(found)}" if found else None


def refuse_other_shapes(given: dict[str, torch.Tensor], own: dict[str, torch.Tensor], ckpt_path: Any) -> None:
    """Raises:
    UserError: The weights of a checkpoint are not those of the model, which no setting can mend.
    """
    for name in [*own, *(name for name in given if name not in own)]:
        there, here = (tuple(tensor.shape) if tensor is not None else "missing"
                       for tensor in (given.get(name), own.get(name)))  # fmt: skip
        if there != here:
            raise UserError(
                f"ckpt_path={ckpt_path} does not fit the model ({name} is {there} there and {here} here): give the "
                "settings of the run that it comes from, with --config RUN/config.yaml"
            )


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, as the configuration gave them if no schedule has changed them yet."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def take_group_settings(
    optimizer: torch.optim.Optimizer, scheduler: LambdaLR, configured: list[dict[str, Any]]
) -> None:
    """Replace the checkpoint's settings by the configuration's; where they agree nothing changes to the bit."""
    for number, (group, settings) in enumerate(zip(optimizer.param_groups, configured, strict=True)):
        for key, value in settings.items():
            if key != "lr" and _plain(group.get(key)) != _plain(value):
                group[key] = value
        group["initial_lr"] = scheduler.base_lrs[number] = settings["lr"]
        group["lr"] = settings["lr"] * scheduler.lr_lambdas[number](scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _listed(found: list[Change]) -> str:
    return ", ".join(map(str, found))


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    """A class by its name, another setting as it is."""
    if isinstance(value, dict) and "class_path" in value:
        return str(value["class_path"]).rsplit(".", 1)[-1]
    return str(value)
