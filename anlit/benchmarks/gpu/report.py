"""What `anlit benchmark gpu` writes into its result folder: one JSON, one Markdown, one log."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anlit.reporting.files import write_json, write_text
from anlit.reporting.table import NONE, markdown_table

LOG_BYTES = 20_000
"""Of each item's output, from its end."""
SAID_LINES = 30
HEAD = ("item", "", "s", "")


def publish(content: Mapping[str, Any], folders: Path, output: Path) -> None:
    """Write the result folder anew.

    Args:
        content: What is known, see `anlit.benchmarks.gpu.runner`.
        folders: Holds a folder for each item.
        output: The result folder.
    """
    items = content["items"]
    said = {name: _end_of(folders / name / "log.txt") for name in items}
    write_json(output / "gpu.json", content)
    write_text(output / "gpu.md", _markdown(content, said))
    write_text(output / "log.txt", "\n".join(f"==== {name}\n{text}" for name, text in said.items() if text))


def _markdown(content: Mapping[str, Any], said: Mapping[str, str]) -> str:
    items = content["items"]
    kind = " (rehearsal at toy sizes)" if content["rehearsal"] else ""
    lines = [f"# anlit benchmark gpu{kind}", f"`{content['calls'][-1]['command']}`, call {len(content['calls'])}"]
    lines.append(markdown_table(HEAD, [_row(name, result) for name, result in items.items()], (0, 1, 3)))
    for name, result in items.items():
        tables = _below(result.get("tables") or "")
        if tables or result["status"] in ("failed", "over its time", "done"):
            lines.append(f"## {name}: {result['what']}")
        if tables:
            lines.append(tables)
        elif result["status"] in ("failed", "over its time", "done"):
            lines.append("```\n" + "\n".join(said[name].splitlines()[-SAID_LINES:]) + "\n```")
    return "\n\n".join(lines) + "\n"


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    seconds = f"{result['seconds']:.0f}" if "seconds" in result else NONE
    status = result["status"]
    if status == "failed":
        status += f" ({result['exit_code']})"
    return [name, status, seconds, result.get("reason") or result["what"]]


def _below(tables: str) -> str:
    """An item's Markdown one heading lower, without its title."""
    lines = tables.splitlines()
    kept = [f"#{line}" if line.startswith("#") else line for line in lines if not line.startswith("# ")]
    return "\n".join(kept).strip()


def _end_of(file: Path) -> str:
    if not file.exists():
        return ""
    return file.read_bytes()[-LOG_BYTES:].decode(errors="replace")
