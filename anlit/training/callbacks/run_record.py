"""`run.json` in the run folder: its launches, data, and how the run ended."""

import logging
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from anlit.checkpoints.location import CHECKPOINTS, complete_checkpoints
from anlit.checkpoints.special_tokens import (
    SpecialTokens,
    has_tokenizer,
    read_special_tokens,
)
from anlit.config.objects import recorded_name, to_plain_values
from anlit.data.attributes import fingerprint_of, tokenizer_content_of
from anlit.data.storage.manifest import TOKENIZER
from anlit.errors import UserError
from anlit.io.provenance import git_state, machine, utc_time, versions
from anlit.io.write import replacing, write_json
from anlit.nn.attention.attention import Attention, attention_layers, kernels_in_use
from anlit.runs.folders import RECORD, read_run_record
from anlit.training.callbacks.checkpoints import is_out_of_time
from anlit.training.lightning_internals import data_module_of
from anlit.training.load_model import device_name
from anlit.training.loggers import log_settings
from anlit.training.resume_checks import run_settings
from anlit.training.weight_averages import averages_of

_log = logging.getLogger(__name__)


class RunRecord(L.Callback):
    """Writes data fingerprint, parameter count, attention kernels, status, and all launches.

    A launch is the start of the run or a continuation. It has time, step, command, changed
    settings, versions, git commit and hardware. Nothing is written before training starts. So a
    refused continuation does not change the record.

    When training starts, the loggers get the settings. The run folder gets a copy of the data's
    tokenizer.json. So it can be moved away from the data. It also gets the special tokens of the
    model that the weights come from.

    Args:
        run_dir: The run folder.
        name: The run's name. None takes the name of an earlier launch, if it had one.
        tags: The run's tags. None takes the tags of an earlier launch.
    """

    changes_learning = False

    def __init__(
        self, run_dir: str, name: str | None = None, tags: Sequence[str] | None = None
    ) -> None:
        self.path = Path(run_dir) / RECORD
        self.name = name
        self.tags = tags
        self.record: dict[str, Any] = {}
        self._attention: list[Attention] = []
        self._earlier_kernels: list[dict[str, Any]] = []
        """The attention kernels of the launches that this one continues."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise UserError on all ranks if they found different default folders."""
        run_dir = str(self.path.parent)
        first_run_dir = trainer.strategy.broadcast(run_dir)
        if not trainer.strategy.reduce_boolean_decision(run_dir == first_run_dir):
            raise UserError(
                f"another run began in {self.path.parent} while the processes of this one started: "
                "start it again, or give it a --run_dir"
            )

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        data = data_module_of(trainer)
        earlier_record = read_run_record(self.path.parent)
        launches = earlier_record.get("launches") or []
        labels = {
            "name": self.name or earlier_record.get("name"),
            "tags": list(self.tags if self.tags is not None else earlier_record.get("tags") or ()),
        }
        self.record = {
            **labels,
            "launches": [*launches, self._launch(trainer, pl_module)],
            "data": fingerprint_of(data),
            "architecture": recorded_name(type(pl_module)),
            "parameters": pl_module.model.n_parameters(),
            # A list after the first batch, empty for a decoder without attention.
            "attention": earlier_record.get("attention") if trainer.global_step else None,
        }
        self._earlier_kernels = self.record["attention"] or []
        if pl_module.begun_from is not None:
            self.record["begun_from"] = pl_module.begun_from
        averages = averages_of(trainer)
        if averages is not None:
            self.record["averaged_by"] = averages.name
        self._attention = attention_layers(pl_module)
        self._write(status="running", ended=None, error=None)
        settings = settings_of(trainer, pl_module) | {"run": labels}
        for logger in trainer.loggers:
            log_settings(logger, settings)
        tokenizer_sha256 = (self.record["data"] or {}).get("tokenizer_sha256")
        if tokenizer_sha256:
            self._copy_tokenizer(data)
            self._copy_special_tokens(pl_module.text_folder, tokenizer_sha256)

    def _launch(self, trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
        """The entry of this launch."""
        devices = [device_name(trainer.strategy.root_device)] * trainer.world_size
        return {
            "started": utc_time(),
            "step": trainer.global_step,
            "command": shlex.join(["anlit", *sys.argv[1:]]),
            "changed": pl_module.changed_settings,
            "peak_rates": pl_module.peak_rates(),
            "versions": versions(),
            "git": git_state(),
            "hardware": {**machine(), "threads": torch.get_num_threads(), "devices": devices},
        }

    def _copy_tokenizer(self, data: Any) -> None:
        """Copy the data's tokenizer.json into the run folder, unless it is lost."""
        with suppress(UserError), replacing(self.path.with_name(TOKENIZER)) as partial:
            partial.write_bytes(tokenizer_content_of(data) or b"")

    def _copy_special_tokens(self, source: Path | None, tokenizer_sha256: str) -> None:
        """Copy special tokens and chat template of a folder, if the data have its tokenizer."""
        if source is None:
            return
        special = read_special_tokens(source)
        if special == SpecialTokens():
            return
        if has_tokenizer(source, tokenizer_sha256):
            special.write(self.path.parent)
        else:
            _log.info(
                f"{self.path.parent} does not keep the chat template and the special tokens of "
                f"{source}: the data have another tokenizer"
            )

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Record the attention kernels if they have changed, as with a longer context."""
        kernels = list(self._earlier_kernels)
        for kernel in kernels_in_use(self._attention):
            if kernel not in kernels:
                kernels.append(kernel)
        if kernels != self.record["attention"]:
            self._write(attention=kernels)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the end, also if no step was left: the run may have been killed there.

        Raises UserError on all ranks if no step was taken although steps are left, or if the folder
        has no checkpoint.
        """
        has_trained = trainer.strategy.broadcast(bool(self.record))
        if not has_trained:
            checkpoints = complete_checkpoints(self.path.parent / CHECKPOINTS)
            obstacle = trainer.strategy.broadcast(obstacle_to_training(trainer, bool(checkpoints)))
            if obstacle is not None:
                raise UserError(obstacle)
        self._finish(trainer)

    @rank_zero_only
    def _finish(self, trainer: L.Trainer) -> None:
        if not self.record:
            name = limit_of(trainer)
            _log.info(
                f"{self.path.parent} has its {trainer.global_step} steps "
                f"(trainer.{name}={getattr(trainer, name)}): nothing to do; more come with "
                f"--trainer.{name} N"
            )
            self.record = read_run_record(self.path.parent)
        if self.record.get("status") != "finished":
            early = stopped_early(trainer)
            if early:
                _log.info(f"{self.path.parent} ends after {early['stopped_early']}")
            self._end("finished", trainer, error=None, **early)

    @rank_zero_only
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if not self.record:
            return
        status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        message = f"{type(exception).__name__}: {exception}"
        try:
            self._end(status, trainer, error=message)
        except OSError as error:  # for example a full disk, which the exception reports
            _log.warning(
                f"{self.path} still says 'running': it could not be written ({error.strerror})"
            )

    def _end(self, status: str, trainer: L.Trainer, error: str | None, **changes: Any) -> None:
        """Record an end whole, so that nothing of an earlier launch's end is left beside it."""
        steps = trainer.global_step
        self._write(status=status, ended=utc_time(), steps=steps, error=error, **changes)

    def _write(self, **changes: Any) -> None:
        self.record |= changes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.record)


def settings_of(trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
    """The settings that loggers get: model, data, run, and the rates of this launch."""
    model = {
        "architecture": recorded_name(type(pl_module)),
        **to_plain_values(dict(pl_module.hparams)),
    }
    settings: dict[str, Any] = {"model": model, **run_settings(trainer)}
    data = data_module_of(trainer)
    fingerprint = fingerprint_of(data)
    if fingerprint is not None:
        settings["data"] = {
            "class": type(data).__name__,
            "path": fingerprint.get("path"),
            "corpus": fingerprint.get("corpus"),
            "tokenizer_sha256": fingerprint.get("tokenizer_sha256"),
            **settings["data"],
        }
    averages = averages_of(trainer)
    if averages is not None:
        settings["averaged_by"] = averages.name
    settings["peak_rate"] = pl_module.peak_rates()
    changes = ", ".join(pl_module.changed_settings)
    settings["launch"] = {"step": trainer.global_step, "changed": changes}
    return settings


def stopped_early(trainer: L.Trainer) -> dict[str, str]:
    """The entry of a run that a callback ended early; empty for all other runs."""
    step = trainer.global_step
    n_steps = trainer.estimated_stepping_batches
    if not trainer.should_stop or step >= n_steps:
        return {}
    stoppers = [type(callback).__name__ for callback in trainer.early_stopping_callbacks]
    stopper = " or ".join(stoppers) or "a callback"
    return {"stopped_early": f"{step} of {n_steps} steps, by {stopper}"}


def limit_of(trainer: L.Trainer) -> str:
    """The Trainer's setting that ended a run."""
    return "max_steps" if trainer.global_step >= trainer.max_steps >= 0 else "max_epochs"


def obstacle_to_training(trainer: L.Trainer, has_checkpoint: bool) -> str | None:
    """The reason why a launch took no step; None for a run without steps left."""
    if is_out_of_time(trainer) and trainer.global_step < trainer.estimated_stepping_batches:
        return "trainer.max_time leaves no time for a step: give a longer one, or leave it out"
    if has_checkpoint:
        return None
    name = limit_of(trainer)
    limit = f"trainer.{name}={getattr(trainer, name)}"
    if trainer.ckpt_path is None:
        return f"{limit} leaves no step to train: set a larger one"
    return (
        f"ckpt_path={trainer.ckpt_path} has {trainer.global_step} steps and {limit} leaves none to "
        "train: give a larger one, or another checkpoint"
    )
