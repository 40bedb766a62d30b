"""English prose from Debian packages, for machines that reach Debian's archive and no hub.

    python docker/english_corpus.py texts/english

writes texts/english/english.jsonl: dictionaries, encyclopaedias, a handbook, the documentation of
Python and the Linux kernel. Debian's `apt-get` downloads the packages and `dpkg-deb` unpacks
them into a temporary folder; nothing is installed.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = [
    "bible-kjv-text",
    "debian-handbook",
    "dict-foldoc",
    "dict-gcide",
    "dict-jargon",
    "dict-wn",
    "linux-doc-6.1",
    "python3.11-doc",
]
SHORTEST_DOCUMENT = 400
"""Characters. Shorter pages are mostly navigation."""
DICTIONARY_DOCUMENT = 6000
"""Characters of consecutive entries that make a document."""

HIDDEN_ELEMENTS = {"head", "nav", "script", "style"}
BLOCK_ELEMENTS = {"br", "dd", "div", "dt", "h1", "h2", "h3", "h4", "li", "p", "pre", "tr"}


class VisibleText(HTMLParser):
    """Collects the text that a browser shows, one line for each block element."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_depth = 0
        self.pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in HIDDEN_ELEMENTS:
            self.hidden_depth += 1
        if tag in BLOCK_ELEMENTS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN_ELEMENTS and self.hidden_depth:
            self.hidden_depth -= 1
        if tag in BLOCK_ELEMENTS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden_depth:
            self.pieces.append(data)


def html_text(html: str) -> str:
    """Return the visible text of a page, with at most one empty line in a row."""
    parser = VisibleText()
    parser.feed(html)
    lines: list[str] = []
    for line in "".join(parser.pieces).splitlines():
        is_second_empty_line = not line.strip() and (not lines or not lines[-1])
        if not is_second_empty_line:
            lines.append(line.rstrip())
    return "\n".join(lines).strip()


def dictionary_documents(text: str) -> Iterator[str]:
    """Group consecutive entries, which begin at the left margin, into documents."""
    document: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        begins_entry = not line[0].isspace()
        if begins_entry and length > DICTIONARY_DOCUMENT:
            yield "".join(document)
            document = []
            length = 0
        document.append(line)
        length += len(line)
    yield "".join(document)


def has_new_prose(path: Path) -> bool:
    """Return False for indices, other languages, and pages that are also text files."""
    if path.name.startswith(("genindex", "search")) or "linux-doc-6.1" in path.parts:
        return False
    return "debian-handbook" not in path.parts or "en-US" in path.parts


def unzipped(path: Path) -> str:
    with gzip.open(path, "rt", errors="replace") as file:
        return file.read()


def file_documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file, none if it has no prose."""
    if path.name.endswith(".dict.dz"):
        yield from dictionary_documents(unzipped(path))
    elif path.name.endswith((".rst.gz", ".txt.gz")):
        yield unzipped(path)
    elif path.suffix == ".html" and has_new_prose(path):
        yield html_text(path.read_text(errors="replace"))


def unpack(packages: list[str], folder: Path) -> None:
    """Download Debian packages and unpack them into `folder`."""
    subprocess.run(["apt-get", "download", *packages], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, folder / "files"], check=True)


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    documents = 0
    characters = 0
    with tempfile.TemporaryDirectory() as scratch, (output / "english.jsonl").open("w") as lines:
        unpack(PACKAGES, Path(scratch))
        for path in sorted(Path(scratch, "files").rglob("*")):
            if path.is_symlink() or not path.is_file() or "_sources" in path.parts:
                continue
            for text in file_documents(path):
                if len(text) > SHORTEST_DOCUMENT:
                    lines.write(json.dumps({"text": text}) + "\n")
                    documents += 1
                    characters += len(text)
    print(
        f"{documents} documents, {characters / 1e6:.0f} million characters: {output}/english.jsonl"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docker/english_corpus.py FOLDER")
    main(Path(sys.argv[1]))
