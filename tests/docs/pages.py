"""The pages that users read, and the commands and files in their fenced blocks."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docker/README.md")
FOLDERS = ("docs", "docs/reference", "docs/results")
PAGES = [ROOT / page for page in FIRST_PAGES]
for folder in FOLDERS:
    PAGES += sorted((ROOT / folder).glob("*.md"))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def shell_lines(page: Path) -> Iterator[str]:
    """Yield the lines of a page's blocks without a language, with continuation lines joined."""
    for language, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        if not language:
            for line in body.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield line.strip()


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every `anlit` command of a page, without the program's name."""
    for line in shell_lines(page):
        command = shlex.split(line, comments=True)
        while command and re.fullmatch(r"[A-Z_]+=\S*", command[0]):
            command = command[1:]
        if command and Path(command[0]).name == "anlit":
            yield command[1:]
        elif command[:2] == ["sbatch", "--nodes=4"]:
            script = command.index("docker/slurm/train.sbatch")
            yield ["fit", *command[script + 1 :]]


def files(page: Path) -> Iterator[tuple[str, str]]:
    """Yield name and content of every block that starts with a comment with a file's name."""
    for _, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        title = re.match(r"# ([\w.]+\.(?:yaml|py))\n", body)
        if title:
            yield title[1], body
