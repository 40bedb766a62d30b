"""Finds checkpoints by their files' names, without torch: a misspelt path is answered at once.

RUN/checkpoints/best.ckpt, last.ckpt    a file; if each rank wrote a part, a link to a folder in checkpoints/.sharded
a sharded checkpoint                    a folder with `REST` and a safetensors file from each rank
an exported model                       a folder with `WEIGHTS` and `SETTINGS`
"""

from pathlib import Path

from anlit.errors import UserError

CHECKPOINTS = "checkpoints"
BEST, LAST = BEST_THEN_LAST = ("best.ckpt", "last.ckpt")
SHARDED = ".sharded"
"""The folder next to the checkpoints that holds sharded ones; the names of checkpoints are links into it."""
REST = "meta.pt"
"""In a sharded checkpoint, the file of all that is not a tensor of the model or the optimizer."""
WEIGHTS, SETTINGS = "model.safetensors", "config.json"
"""The files of an exported model."""


def is_sharded(path: str | Path) -> bool:
    """Whether `path` is a checkpoint with a part from every rank."""
    return (Path(path) / REST).is_file()


def is_exported(path: str | Path) -> bool:
    """Whether `path` is a folder that `anlit export` or `anlit import` made."""
    return (Path(path) / WEIGHTS).is_file() and (Path(path) / SETTINGS).is_file()


def is_checkpoint(path: str | Path) -> bool:
    """Whether training can go on from `path`: a file or a sharded checkpoint."""
    return Path(path).is_file() or is_sharded(path)


def checkpoint_of_run(run: str | Path, names: tuple[str, ...] = BEST_THEN_LAST) -> Path | None:
    """The first of `names` that the run folder has; None if it has none."""
    return next(filter(is_checkpoint, (Path(run) / CHECKPOINTS / name for name in names)), None)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first; the name of a file that is being written begins with a dot."""
    files = [file for file in folder.glob("[!.]*.ckpt") if file.exists()]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def name_to_continue(folder: Path) -> str:
    """What --ckpt_path is to be, to go on with the run whose checkpoints are in `folder`."""
    others = complete_checkpoints(folder)
    return "last" if (folder / LAST).exists() or not others else str(others[0])


def find_checkpoint(path: str) -> Path:
    """A checkpoint, an exported folder, or the best, else the last checkpoint of a run folder; UserError for others."""
    if not Path(path).exists():
        raise UserError(
            f"{path} does not exist: give a run folder or a checkpoint such as RUN/checkpoints/best.ckpt"
        )
    file = Path(path) if is_checkpoint(path) or is_exported(path) else checkpoint_of_run(path)
    if file is None:
        advice = "give a run folder whose training has saved one, or a .ckpt file"
        raise UserError(f"{path} has no {CHECKPOINTS}/{' or '.join(BEST_THEN_LAST)}: {advice}")
    return file


def refuse_address(path: str | Path) -> None:
    """Raises UserError for a checkpoint that is not on a file system of this machine."""
    if "://" in str(path) or str(path).startswith("registry"):
        advice = "download it, and give the path of the file or folder"
        raise UserError(f"the checkpoint {path} is not on this machine: {advice}")
