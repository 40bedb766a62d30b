"""Whether there is anything at a checkpoint's path, without torch: a misspelt one is answered at once."""

from pathlib import Path

from anlit.errors import UserError


def require_path(path: str) -> None:
    """Raises:
    UserError: Nothing is there.
    """
    if not Path(path).exists():
        raise UserError(f"{path} does not exist: give a run folder or a checkpoint such as RUN/checkpoints/best.ckpt")
