"""What every evaluation writes: raw numbers with what they were measured on, and tables."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from anlit.benchmarks.record import environment
from anlit.checkpoints.loading import Checkpoint
from anlit.data.module import TokenShards
from anlit.errors import UserError

NONE = "–"


def output_folder(output: str) -> Path:
    """The folder `output`, made where missing.

    Raises:
        UserError: It cannot be made.
    """
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be made ({error.strerror}): give a writable folder") from error
    return folder


def header(command: str, checkpoints: Sequence[Checkpoint], data: TokenShards | None = None) -> dict[str, Any]:
    """What a record begins with: command, time, commit, versions, hardware, checkpoints and the data's fingerprint.

    Call it before measuring: it notes how busy the machine is.
    """
    return {
        "command": command,
        **environment(),
        "device": device_name(checkpoints[0].device) if checkpoints else None,
        "checkpoints": [describe(checkpoint) for checkpoint in checkpoints],
        "data": data.fingerprint if data is not None else None,
    }


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """One checkpoint in a record."""
    return {
        "label": checkpoint.label,
        "file": str(checkpoint.file),
        "step": checkpoint.step,
        "seed": (checkpoint.config or {}).get("seed_everything"),
        "architecture": checkpoint.architecture,
        "parameters": checkpoint.model.model.n_parameters(),
        "training_length": checkpoint.training_length,
        "trained_on": checkpoint.trained_on,
    }


def write_json(folder: Path, name: str, record: dict[str, Any]) -> Path:
    """Write `record` as FOLDER/NAME in UTF-8; a number that is not finite becomes null.

    Raises:
        UserError: The folder cannot be written.
    """
    return write_text(folder, name, json.dumps(finite(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(folder: Path, name: str, text: str) -> Path:
    """Write FOLDER/NAME.

    Raises:
        UserError: The folder cannot be written.
    """
    file = folder / name
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written ({error.strerror}): give a writable folder") from error
    return file


def finite(value: Any) -> Any:
    """`value` with None for every number in it that is not finite, as JSON has none."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first column is aligned left, the others right."""
    rule = [":---", *["---:"] * (len(head) - 1)]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def provenance(record: dict[str, Any]) -> str:
    """The header of a record as a list in Markdown, for the end of a report."""
    git = record["git"]
    commit = (git["commit"] + (" (with changes)" if git["dirty"] else "")) if git else "not recorded"
    data = record["data"] or {}
    lines = [
        f"- command: `{record['command']}`",
        f"- commit: {commit}, {record['when']}",
        f"- hardware: {record['hardware']['cpu']}, {record['hardware']['cores']} cores; device {record['device']}",
        "- versions: " + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    ]
    if data:
        lines.append(f"- data: {data['corpus']}, `{data['path']}`, content {str(data['content_sha256'])[:12]}")
    lines += [f"- {one['label']}: `{one['file']}`, step {one['step']:,}" for one in record["checkpoints"]]
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    """The GPU's model, else the device's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
