"""Safe reading of sharded checkpoints from others: torch unpickles parts of them, and a pickle can run any code."""

import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

METADATA = ".metadata"
_OF_METADATA = "torch.distributed.checkpoint.metadata"
_OF_STORAGE = {"_StorageInfo", "_StoragePrefix"}


def check_plain(folder: Path) -> None:
    """Check all that torch will unpickle: the metadata, and the entries that are not tensors.

    Raises:
        pickle.UnpicklingError: There are objects other than tensors and plain values.
    """
    with (folder / METADATA).open("rb") as file:
        metadata = _PlainMetadata(file).load()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            stored = metadata.storage_data[MetadataIndex(name)]
            with (folder / stored.relative_path).open("rb") as file:
                file.seek(stored.offset)
                torch.load(io.BytesIO(file.read(stored.length)), weights_only=True)


class _PlainMetadata(pickle.Unpickler):
    """Refuses every class except torch's descriptions of tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        if "." in name or not _is_harmless(module, name):
            raise pickle.UnpicklingError(f"its {METADATA} names {module}.{name}, which no checkpoint does")
        return super().find_class(module, name)


def _is_harmless(module: str, name: str) -> bool:
    if module == _OF_METADATA:
        found = getattr(descriptions, name, None)
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
