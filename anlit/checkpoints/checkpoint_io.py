"""Checkpoints on disk, complete or absent: a file, or a folder with a shard from each rank."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from anlit.checkpoints.exported import read_exported
from anlit.checkpoints.integrity import (
    TRAINING,
    UNREADABLE,
    require_content,
    verify,
)
from anlit.checkpoints.location import is_exported, is_sharded, refuse_address
from anlit.checkpoints.newest import (
    damaged_checkpoint,
    has_weights_alone,
    read_without_shards,
)
from anlit.checkpoints.sharded import read_tensors, with_tensors
from anlit.checkpoints.writing import (
    PARTIAL,
    first_cause,
    give_name,
    remove_unnamed,
    write_durably,
    write_failed,
)
from anlit.errors import UserError


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints to a temporary file and renames it.

    A kill while writing keeps the old file. Only files that this process wrote are removed. Other
    names may come from a foreign checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[str] = set()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of one file.

        Raises UserError for an address, RunError if the file cannot be written.
        """
        refuse_address(path)
        self.written.add(str(path))
        target = Path(path)
        partial = target.with_name(PARTIAL + target.name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(checkpoint, partial)
            give_name(partial, target)
        except (OSError, RuntimeError) as error:  # torch reports a failed write as a RuntimeError
            with suppress(OSError):
                partial.unlink(missing_ok=True)  # on a full disk run.json needs the space
            raise write_failed(target, first_cause(error)) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> Any:
        """Read a checkpoint of any form: tensors and plain values, as in a single file.

        Raises UserError if the checkpoint is damaged.
        """
        try:
            # Without mmap: the optimizer keeps these tensors when the file is gone.
            return read_checkpoint(path, mmap=False)
        except UNREADABLE as error:
            raise damaged_checkpoint(Path(path), error) from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file, or the link and the folder that no other link points to."""
        if str(path) in self.written:
            Path(path).unlink(missing_ok=True)
            remove_unnamed(Path(path).parent)


def read_checkpoint(path: str | Path, mmap: bool = True) -> dict[str, Any]:
    """Read a checkpoint of any form, or an exported model, to the CPU, with weights_only=True.

    Raises an error of `UNREADABLE`, also if the checkpoint has changed or its shards do not match.
    """
    path = Path(path)
    if is_exported(path):
        return read_exported(path)
    verify(path)
    content = read_without_shards(path, mmap)
    if is_sharded(path):
        content = with_tensors(content, read_tensors(path))
        states = content.get("optimizer_states", [])
        content["optimizer_states"] = [by_number(state) for state in states]
    return content


def refuse_damaged(path: Path) -> None:
    """Check the whole checkpoint that a run continues from, before anything is started or written.

    Raises UserError if the checkpoint is damaged or has weights alone. The message names another
    checkpoint of the folder, if any.
    """
    try:
        verify(path)
        content = read_without_shards(path)
        if not has_weights_alone(content):
            require_content(content, TRAINING)
    except UNREADABLE as error:
        raise damaged_checkpoint(path, error) from error
    if has_weights_alone(content):
        raise UserError(
            f"ckpt_path={path} has weights alone (save_weights_only), and no optimizer's state to "
            f"continue with: begin a run from them with --initial_weights {path}"
        )


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state in torch's form: numbers by the groups' order replace names."""
    numbers: dict[Any, int] = {}
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    return rename_parameters(state, numbers)


def rename_parameters(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with new keys for its parameters: `names` has old key → new key."""
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [names[key] for key in group["params"]]})
    entries = {names[key]: entry for key, entry in state.get("state", {}).items()}
    return {"state": entries, "param_groups": groups}
