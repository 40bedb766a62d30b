"""Finds checkpoints by the names of files.

It must not import torch. So the error for a misspelt path comes at once. The names below are in
folders that users have. Another name would make their checkpoints unreadable.

RUN/checkpoints/best.ckpt, last.ckpt    a file, or a link to a folder in checkpoints/.sharded
a sharded checkpoint                    a folder with `META` and a safetensors file from each rank
an exported model                       a folder with `SETTINGS`, and `WEIGHTS` or `INDEX`
"""

from pathlib import Path
from typing import Any

from anlit.errors import UserError
from anlit.io.read import read_json

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
BEST = "best.ckpt"
LAST = "last.ckpt"
BEST_THEN_LAST = (BEST, LAST)
STEP_NAME = "step-{step:08d}"
"""The name of a checkpoint that a run keeps of a step, without `.ckpt`."""
SHARDED = ".sharded"
"""The folder of sharded checkpoints, beside the links to them."""
META = "meta.pt"
"""In a sharded checkpoint, the file with everything but the tensors of model and optimizer."""
WEIGHTS = "model.safetensors"
"""The weights of an exported model."""
INDEX = f"{WEIGHTS}.index.json"
"""In a model whose weights are in shards, the file with the shard of each weight."""
MAX_SHARD_SIZE = "50GB"
"""The size of a shard unless the user says otherwise: the default of transformers."""
SETTINGS = "config.json"
"""The settings of an exported model, and of a model of transformers."""
MODEL_TYPE_PREFIX = "anlit_"
"""Start of the `model_type` of every model for transformers with anlit's own code."""
LONGEST_NAME = 40
"""Characters of a name from a file in a message."""


def is_sharded(path: str | Path) -> bool:
    """Whether `path` is a checkpoint with a shard from every rank."""
    return (Path(path) / META).is_file()


def is_exported(path: str | Path) -> bool:
    """Whether `path` is a folder that `anlit export` or `anlit import` made.

    A model of transformers may have the same files, see `refuse_transformers`.
    """
    return (Path(path) / SETTINGS).is_file() and _has_weights(path)


def _has_weights(path: str | Path) -> bool:
    return any((Path(path) / name).is_file() for name in (WEIGHTS, INDEX))


def is_checkpoint(path: str | Path) -> bool:
    """Whether training can continue from `path`, a file or a sharded checkpoint."""
    return Path(path).is_file() or is_sharded(path)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder RUN of RUN/checkpoints/FILE; None for a file elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def checkpoint_of_run(run: str | Path, names: tuple[str, ...] = BEST_THEN_LAST) -> Path | None:
    """The run folder's first checkpoint in the order of `names`; None without a checkpoint."""
    paths = [Path(run) / CHECKPOINTS / name for name in names]
    return next(filter(is_checkpoint, paths), None)


def last_if_run(path: str) -> str:
    """The last checkpoint of a run folder; another path, and `last` and `best`, as they are."""
    if path in ("last", "best") or is_checkpoint(path):
        return path
    return str(checkpoint_of_run(path, (LAST,)) or path)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, newest first, without files that are being written (`.…`)."""
    # A link to a folder that is gone does not exist.
    files = [file for file in folder.glob("[!.]*.ckpt") if file.exists()]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def find_checkpoint(path: str) -> Path:
    """The checkpoint or exported model `path`; a run folder's best, else its last checkpoint.

    Raises UserError if the path has no checkpoint, a part of an exported model, or a model of
    transformers.
    """
    if not Path(path).exists():
        raise UserError(
            f"{path} does not exist: give a run folder or a checkpoint such as "
            "RUN/checkpoints/best.ckpt"
        )
    file = Path(path) if is_checkpoint(path) else checkpoint_of_run(path)
    if file is None:
        refuse_transformers(path)  # a run's folder may hold any file of the user's
        file = Path(path) if is_exported(path) else None
    if file is None:
        _refuse_incomplete_export(Path(path))
        advice = "give a run folder whose training has saved one, or a .ckpt file"
        raise UserError(f"{path} has no {CHECKPOINTS}/{' or '.join(BEST_THEN_LAST)}: {advice}")
    return file


def _refuse_incomplete_export(folder: Path) -> None:
    """Raise UserError for a folder whose export or import was killed, or was copied in part."""
    missing = None
    if any(folder.glob("*.safetensors*")) and not (folder / SETTINGS).is_file():
        missing = SETTINGS
    elif (folder / SETTINGS).is_file() and "anlit" in read_json(folder / SETTINGS, dict):
        missing = f"{WEIGHTS} and no {INDEX}"
    if missing is not None:
        raise UserError(
            f"{folder} holds a part of an exported model and no {missing}: remove the folder, and "
            "copy or export the model again"
        )


def refuse_transformers(path: str | Path) -> None:
    """Raise UserError for a folder with a model in transformers' form."""
    settings = Path(path) / SETTINGS
    record = read_json(settings, dict) if settings.is_file() else {}
    refuse_own_code(record, path)
    if "model_type" in record:
        raise UserError(
            f"{path} is a model of transformers: import it first, with "
            f"anlit import {path} --output DIR"
        )


def refuse_own_code(record: dict[str, Any], path: str | Path) -> None:
    """Raise UserError for a model in transformers' form that needs anlit's code. It is folded.

    `record` is the content of its config.json.
    """
    model_type = str(record.get("model_type"))[:LONGEST_NAME]
    if model_type.startswith(MODEL_TYPE_PREFIX):
        raise UserError(
            f"{path} was written for transformers by anlit export --format huggingface "
            f"(model_type={model_type!r}), and no command of anlit reads it: take the run folder "
            "or the checkpoint that it was exported from"
        )


def refuse_address(path: str | Path) -> None:
    """Raise UserError for a checkpoint that is not on a file system of this machine."""
    # Lightning would take `registry:NAME` from its model registry.
    if "://" in str(path) or str(path).startswith("registry"):
        advice = "download it, and give the path of the file or folder"
        raise UserError(f"the checkpoint {path} is not on this machine: {advice}")
