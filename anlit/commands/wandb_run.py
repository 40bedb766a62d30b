"""Continues a run at Weights & Biases: the run folder keeps the id of its run there."""

import secrets
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from anlit.config.labels import as_list, class_name
from anlit.io.write import write_text
from anlit.training.loggers import WANDB_RUN_ID


def with_wandb_run(config: Any, run_dir: str) -> Any:
    """Return a copy in which WandbLoggers write into the run folder, under the run's id.

    They take the name and the tags of the run, unless they have others. A new run with this run's
    config.yaml gets another id.
    """
    config = deepcopy(config)
    for logger in _configured_wandb_loggers(config):
        settings = logger.init_args
        settings.id = settings.get("id") or _run_id(run_dir)
        settings.name = settings.get("name") or config.name
        settings.save_dir = run_dir
        further = dict(logger.get("dict_kwargs") or {})  # arguments of wandb.init
        if config.tags:
            further.setdefault("tags", config.tags)
        logger.dict_kwargs = further
    return config


def finish_wandb_run() -> None:
    """Write the rest of this process's run at Weights & Biases, if it has a run there."""
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        wandb.finish()


def _configured_wandb_loggers(config: Any) -> list[Any]:
    found = []
    for logger in as_list(config.get("trainer.logger")):
        if class_name(getattr(logger, "class_path", "")) == "WandbLogger":
            found.append(logger)
    return found


def _run_id(run_dir: str) -> str | None:
    """Return the id in the run folder, a new id if it has none; None on ranks that log nothing."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return None
    file = Path(run_dir) / WANDB_RUN_ID
    if not file.is_file():
        write_text(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()
