"""The checkpoint that `anlit validate` and `test` evaluate; they never evaluate an untrained model."""

from pathlib import Path

from anlit.checkpoints.location import (
    BEST,
    BEST_THEN_LAST,
    CHECKPOINTS,
    LAST,
    checkpoint_of_run,
    find_checkpoint,
    is_exported,
    refuse_address,
)
from anlit.errors import UserError


def checkpoint_to_evaluate(ckpt_path: str | None, run_dir: str | None, configs: list[str], command: str) -> str:
    """The checkpoint of `ckpt_path`; for None, `best` and `last` a checkpoint of the configuration's run.

    Args:
        ckpt_path: A checkpoint, a run folder, best, last, or None for the best checkpoint, else the last.
        run_dir: The configuration's run folder.
        configs: The configuration files. If a run was moved, one of them is in its folder.

    Raises:
        UserError: There is no such checkpoint.
    """
    if ckpt_path not in (None, "best", "last"):
        refuse_address(ckpt_path)
        if is_exported(ckpt_path):
            raise UserError(
                f"ckpt_path={ckpt_path} is an exported model, which anlit {command} does not read: give the run's "
                "checkpoint, or use anlit lengths"
            )
        return str(find_checkpoint(ckpt_path))
    names = {None: BEST_THEN_LAST, "best": (BEST,), "last": (LAST,)}[ckpt_path]
    folders = list(dict.fromkeys([*(Path(config).parent for config in configs), *([Path(run_dir)] if run_dir else [])]))
    for folder in folders:
        if (checkpoint := checkpoint_of_run(folder, names)) is not None:
            return str(checkpoint)
    searched = " or ".join(str(folder / CHECKPOINTS) for folder in folders) or "any run"
    wanted = f"ckpt_path={ckpt_path}" if ckpt_path else f"anlit {command} without --ckpt_path"
    raise UserError(
        f"{wanted} finds no {' or '.join(names)} in {searched}: give "
        "--config RUN/config.yaml of a trained run, or --ckpt_path RUN/checkpoints/best.ckpt"
    )
