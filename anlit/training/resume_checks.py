"""Continuing or evaluating a run with settings that differ from those of its checkpoint.

Settings                                        On a change
model: its shape, heads, attention, positions … refused; with `accept_changes` the new ones are used
optimizer's class                               refused; with `accept_changes` it starts without state
seed_everything                                 refused; with `accept_changes` the new one is used
what is validated, such as data.val_blocks      refused, because best.ckpt and curves would mix two measures; as above
learning rates, betas, weight decay, schedule,  the new ones are used from the next step on, and one line is logged
dropout, z_loss, runtime, kernel, Trainer's,
data.batch_size, number of devices

`validate` and `test` refuse the changes of the model that `fit` refuses.

So config.yaml, which is written when training starts, has the settings that the run continues with. The data module
itself refuses other texts or another order.
"""

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from anlit.config.labels import MEASURED, class_name
from anlit.errors import UserError

TAKEN = ("model.optimizer.", "model.schedule", "model.dropout", "model.z_loss", "model.runtime", "model.kernel",
         "trainer.", "data.")  # fmt: skip
"""Prefixes of the settings that a continued run may change, but for `MEASURED`. `model.optimizer` without a dot is the
class."""
OF_RUN = (
    "trainer.max_steps", "trainer.accumulate_grad_batches", "trainer.gradient_clip_val", "trainer.world_size",
    "trainer.gradient_clip_algorithm", "data.batch_size", "data.context_schedule", *MEASURED,
)  # fmt: skip


def run_settings(trainer: L.Trainer) -> dict[str, Any]:
    """The settings of a run that a checkpoint records in addition to the model's."""
    seed = os.environ.get("PL_GLOBAL_SEED")  # set by seed_everything
    values: dict[str, Any] = {"trainer": {"precision": str(trainer.precision)}, "data": {}}
    owners = {"trainer": trainer, "data": getattr(trainer, "datamodule", None)}
    for section, name in (key.split(".") for key in OF_RUN):
        value = getattr(owners[section], name, None)
        values[section][name] = getattr(
            value, "value", value
        )  # of an enumeration, which no checkpoint may hold
    return values | {"seed_everything": int(seed) if seed is not None else None}


def changes(
    then: dict[str, Any], now: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Dotted name, and `name old → new`, of settings that differ. Of a class that was replaced, not its arguments."""
    for key in [*then, *(key for key in now if key not in then)]:
        if str(key).startswith("_"):  # a step of a context schedule is a number
            continue
        name, a, b = f"{prefix}{key}", _plain(then.get(key)), _plain(now.get(key))
        if (
            isinstance(a, dict)
            and isinstance(b, dict)
            and a.get("class_path") == b.get("class_path")
        ):
            if "class_path" in a:
                a, b = a.get("init_args") or {}, b.get("init_args") or {}
            yield from changes(a, b, f"{name}.")
        elif a != b:
            old, new = (
                (class_name(value) or value) if isinstance(value, dict) else value
                for value in (a, b)
            )
            yield name, f"{name} {old} → {new}"


def check_changes(changed: dict[str, str], ckpt_path: Any) -> None:
    """Raise UserError if a setting has changed that a continued run may not change."""
    if refused := ", ".join(
        text for name, text in changed.items() if not name.startswith(TAKEN) or name in MEASURED
    ):
        raise UserError(
            f"ckpt_path={ckpt_path} was trained with other settings ({refused}): set them back as "
            "in the run's config.yaml, or give --accept_changes true to go on with the new ones"
        )


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the settings of each parameter group, without the parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def take_group_settings(
    optimizer: Optimizer, scheduler: LambdaLR, configured: list[dict[str, Any]]
) -> None:
    """Replace the checkpoint's settings by the configured ones. Equal settings change nothing, to the last bit."""
    for number, (group, settings) in enumerate(
        zip(optimizer.param_groups, configured, strict=True)
    ):
        for key, value in settings.items():
            if key != "lr" and _plain(group.get(key)) != _plain(value):
                group[key] = value
        group["initial_lr"] = scheduler.base_lrs[number] = settings["lr"]
        group["lr"] = settings["lr"] * scheduler.lr_lambdas[number](scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
