"""Reading a sharded checkpoint that somebody else made: torch unpickles parts of it, and a pickle can run any code."""

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, ReadItem
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

METADATA = ".metadata"
_OF_METADATA = "torch.distributed.checkpoint.metadata"
_OF_STORAGE = {"_StorageInfo", "_StoragePrefix"}


def read_states(folder: Path) -> dict[str, Any]:
    """The tensors and plain values of a sharded checkpoint, whole, on the CPU.

    Raises:
        pickle.UnpicklingError: It holds something else.
    """
    with (folder / METADATA).open("rb") as file:
        _PlainMetadata(file).load()
    states: dict[str, Any] = {}
    try:
        _load_state_dict(states, storage_reader=FileSystemReader(folder), planner=_PlainValues(), no_dist=True)
    except CheckpointException as error:  # not an Exception
        first = next(iter(error.failures.values()))[0]
        raise pickle.UnpicklingError(str(first)) from error
    return states


class _PlainMetadata(pickle.Unpickler):
    """Refuses every name but those of torch's descriptions of tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        if "." not in name:
            found = super().find_class(module, name) if _is_harmless(module, name) else None
            if found is not None:
                return found
        raise pickle.UnpicklingError(f"its {METADATA} names {module}.{name}, which no checkpoint does")


def _is_harmless(module: str, name: str) -> bool:
    if module == _OF_METADATA:
        found = getattr(torch.distributed.checkpoint.metadata, name, None)
        return isinstance(found, type) and found.__module__ == _OF_METADATA
    if module == "torch":
        return name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
    if module.split(".")[0] == "pathlib":
        return name in {kind.__name__ for kind in (*PurePath.__subclasses__(), *Path.__subclasses__())}
    return (
        (module == "torch.distributed.checkpoint.filesystem" and name in _OF_STORAGE)
        or (module, name) == ("torch.serialization", "_get_layout")
        or (module, name) == ("collections", "OrderedDict")
    )


class _PlainValues(_EmptyStateDictLoadPlanner):
    """Everything that the metadata lists; entries that are no tensors are looked at before torch unpickles them."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
