"""Checks by checksums that a checkpoint has not changed since it was written.

torch.save writes a ZIP archive with a CRC-32 of each record. So a copy of the file can be checked
alone. torch does not check it. It loaded 2,942 of 3,000 files with a flipped bit, without a
warning. The checksums found all of them. safetensors has no checksums. So `SUMS` in a sharded
checkpoint holds the checksums of the shards.
"""

import pickle
import zipfile
import zlib
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError

from anlit.checkpoints.location import META
from anlit.io.read import check_content, read_json

SUMS = "sums.json"
"""In a sharded checkpoint, the file with size and CRC-32 of each shard."""
UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    AttributeError,
    TypeError,
    ArithmeticError,
    LookupError,
    zipfile.BadZipFile,
    zlib.error,
    SafetensorError,
)
"""The errors of reading a damaged or foreign checkpoint.

RuntimeError includes NotImplementedError and RecursionError.
"""
MODEL: dict[str, Any] = {
    "hyper_parameters": dict,
    "global_step": int,
    "anlit": {"architecture": str},
}
"""The entries that a model needs, as a schema of `anlit.io.read`."""
TRAINING = MODEL | {
    "loops": {"fit_loop": dict},
    "callbacks": dict,
    "lr_schedulers": list,
    "epoch": int,
    "state_dict": dict,
    "optimizer_states": [{"state": dict, "param_groups": list}],
}
"""The entries that a continued run needs."""


class DamagedError(ValueError):
    """A checkpoint has changed since it was written. The message names the place in a few words."""


def verify(path: Path) -> None:
    """Compare all checksums of a single-file or sharded checkpoint, at about 2 GB/s.

    Raises an error of `UNREADABLE` if something is missing, truncated or changed.
    """
    if path.is_dir():
        for name, expected in read_json(path / SUMS, dict, "choose another checkpoint").items():
            shard = path / Path(name).name
            if not shard.is_file() or checksum(shard) != expected:
                raise DamagedError(
                    f"its file {shard.name} is missing or has changed since it was written"
                )
        path = path / META
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise DamagedError(f"{path.name} is empty, cut short or no checkpoint")
    with zipfile.ZipFile(path) as archive:
        changed_record = archive.testzip()
        if changed_record is not None:
            raise DamagedError(f"{changed_record} in {path.name} has changed since it was written")


def checksum(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    crc32 = 0
    with file.open("rb") as opened:
        while block := opened.read(2**22):
            crc32 = zlib.crc32(block, crc32)
        return {"bytes": opened.tell(), "crc32": crc32}


def require_content(content: Any, schema: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint lacks an entry of `schema`, `MODEL` or `TRAINING`."""
    if not isinstance(content, dict) or not isinstance(content.get("anlit"), dict):
        raise DamagedError("anlit did not write it")
    check_content(content, schema, complete=True)


def reason(error: BaseException) -> str:
    """The first sentence of an error, shortened: torch's explanations fill a screen."""
    sentence = " ".join(str(error).split()).split(". ")[0]
    return shorten(sentence, 160, placeholder=" …") or type(error).__name__
