"""Weights & Biases: the run folder keeps the id of its run there, so that a continued training continues that run."""

import importlib.util
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.utilities import rank_zero_only

from anlit.config.labels import class_name
from anlit.errors import UserError, install
from anlit.io.write import write_text

RUN_ID = "wandb-run-id"
"""The file of the run folder."""


@contextmanager
def wandb_run(config: Any, run_dir: str) -> Iterator[None]:
    """Let WandbLoggers of the configuration that are made inside write into the run folder, under the run's own id.

    Afterwards the configuration is as before: a run that is started from this one's config.yaml gets an id of its own.
    Raises UserError if wandb is not installed.
    """
    given = config.get("trainer.logger")
    loggers = [logger for logger in (given if isinstance(given, list) else [given])
               if class_name(getattr(logger, "class_path", "")) == "WandbLogger"]  # fmt: skip
    if loggers and importlib.util.find_spec("wandb") is None:
        raise UserError(f"trainer.logger=WandbLogger needs wandb: {install('wandb', 'wandb')}")
    before = [logger.init_args for logger in loggers]
    for logger, settings in zip(loggers, before, strict=True):
        own = {"id": settings.get("id") or _id_of(run_dir), "save_dir": run_dir}
        logger.init_args = Namespace(vars(settings) | own)
    try:
        yield
    finally:
        for logger, settings in zip(loggers, before, strict=True):
            logger.init_args = settings


def finish_wandb_run() -> None:
    """Write what is left of this process's run at Weights & Biases, if it has one."""
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.finish()


def _id_of(run_dir: str) -> str | None:
    """The id in the run folder, a new one where there is none; None on ranks that log nothing."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return None
    file = Path(run_dir) / RUN_ID
    if not file.is_file():
        write_text(file, secrets.token_hex(4) + "\n")
    return file.read_text().strip()
