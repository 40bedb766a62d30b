"""The provenance of an evaluation's numbers, for its record and report."""

from typing import Any

from anlit.reporting.provenance import environment
from anlit.reporting.text import code, literal


def header(command: str) -> dict[str, Any]:
    """The beginning of a record: command, time, commit, versions, hardware; device, checkpoints and data are unknown.

    Call it before measuring, because it records the load of the machine.
    """
    return {"command": command, **environment(), "device": None, "checkpoints": [], "data": None}


def provenance(record: dict[str, Any]) -> str:
    """The header of a record as a list in Markdown, for the end of a report."""
    git = record["git"]
    commit = (git["commit"] + (" (with changes)" if git["dirty"] else "")) if git else "not recorded"
    data = record["data"] or {}
    machine = f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores; device {record['device']}"
    lines = [
        f"- command: {code(record['command'])}",
        f"- commit: {commit}, {record['when']}",
        f"- hardware: {literal(machine)}",
        "- versions: " + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    ]
    if data:
        content = str(data["content_sha256"])[:12]
        lines.append(f"- data: {literal(str(data['corpus']))}, {code(str(data['path']))}, content {content}")
    lines += [f"- {literal(one['label'])}: {code(one['file'])}, step {one['step']:,}" for one in record["checkpoints"]]
    return "\n".join(lines)
