"""`run.json` in the run folder: its launches, data, and how the run ended."""

import logging
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from anlit.attention.attention import kernels_in_use
from anlit.checkpoints.loading import device_name
from anlit.data.storage.manifest import TOKENIZER
from anlit.errors import UserError
from anlit.models.continuing import run_settings
from anlit.reading import read_json
from anlit.reporting.files import replacing, write_json
from anlit.reporting.provenance import git_state, machine, now, versions
from anlit.runs.folders import RECORD, RECORD_SCHEMA
from anlit.settings import to_plain_values
from anlit.training.loggers import log_settings

_log = logging.getLogger(__name__)


class RunRecord(L.Callback):
    """Writes data fingerprint, parameter count, attention kernels, status, and an entry for each launch.

    A launch is the start of the run or a continuation: time, step, command, the settings that it changed, versions, git
    commit and hardware. Nothing is written before training starts, so a refused continuation does not change the
    record. The loggers get the settings then, and the run folder a copy of the data's tokenizer.json, so that it can be
    moved away from its data.
    """

    def __init__(self, run_dir: str) -> None:
        self.path = Path(run_dir) / RECORD
        self.record: dict[str, Any] = {}

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        data = getattr(trainer, "datamodule", None)
        devices = [device_name(trainer.strategy.root_device)] * trainer.world_size
        launch = {
            "started": now(),
            "step": trainer.global_step,
            "command": shlex.join(["anlit", *sys.argv[1:]]),
            "changed": pl_module.changed_settings,
            "versions": versions(),
            "git": git_state(),
            "hardware": {**machine(), "threads": torch.get_num_threads(), "devices": devices},
        }
        self.record = {
            "launches": [
                *(read_json(self.path, RECORD_SCHEMA, missing={}).get("launches") or []),
                launch,
            ],
            "data": data.fingerprint if data is not None else None,
            "architecture": type(pl_module).__name__,
            "parameters": pl_module.model.n_parameters(),
            "attention": [],  # known from the first batch on
        }
        self._write(status="running", ended=None, error=None)
        settings = {
            "model": {
                "architecture": type(pl_module).__name__,
                **to_plain_values(dict(pl_module.hparams)),
            },
            **run_settings(trainer),
        }
        for logger in trainer.loggers:
            log_settings(logger, settings)
        if data is not None and data.manifest.get("tokenizer_sha256"):
            with (
                suppress(UserError),
                replacing(self.path.with_name(TOKENIZER)) as partial,
            ):  # it may be lost
                partial.write_bytes(data.tokenizer_content)

    @rank_zero_only
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Write which kernels compute attention, where that is news: a longer context may bring another."""
        kernels = kernels_in_use(pl_module)
        if kernels != self.record["attention"]:
            self._write(attention=kernels)

    @rank_zero_only
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Also where a continued run has nothing left to do, and says so: it may have been killed at its end."""
        if not self.record:
            name = "max_steps" if trainer.global_step >= trainer.max_steps > 0 else "max_epochs"
            has = f"{self.path.parent} has its {trainer.global_step} steps (trainer.{name}={getattr(trainer, name)})"
            _log.info(f"{has}: nothing to do; more come with --trainer.{name} N")
        self.record = self.record or read_json(self.path, RECORD_SCHEMA, missing={})
        if self.record.get("status") != "finished":
            early = {}
            if trainer.should_stop and (step := trainer.global_step) < (
                steps := trainer.estimated_stepping_batches
            ):
                stoppers = [type(each).__name__ for each in trainer.early_stopping_callbacks]
                early = {
                    "stopped_early": f"{step} of {steps} steps, by {' or '.join(stoppers) or 'a callback'}"
                }
                _log.info(f"{self.path.parent} ends after {early['stopped_early']}")
            self._write(status="finished", ended=now(), **early)

    @rank_zero_only
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self.record:
            status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
            try:
                self._write(
                    status=status, ended=now(), error=f"{type(exception).__name__}: {exception}"
                )
            except OSError as error:  # for example a full disk, which the exception reports
                _log.warning(
                    f"{self.path} still says 'running': it could not be written ({error.strerror})"
                )

    def _write(self, **changes: Any) -> None:
        self.record |= changes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.record)
