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
    """Every line of a page's blocks without a language, continuation lines joined."""
    for language, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        if not language:
            yield from filter(None, map(str.strip, body.replace("\\\n", " ").splitlines()))


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `anlit` command of a page, without the program's name."""
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and Path(words[0]).name == "anlit":
            yield words[1:]
        elif words[:2] == ["sbatch", "--nodes=4"]:
            yield ["fit", *words[words.index("docker/slurm/train.sbatch") + 1 :]]


def files(page: Path) -> Iterator[tuple[str, str]]:
    """Name and content of every block whose first line is a comment with a file's name."""
    for _, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        if match := re.match(r"# ([\w.]+\.(?:yaml|py))\n", body):
            yield match[1], body
