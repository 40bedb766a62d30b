"""The documentation keeps its limits, and the files that it names exist."""

import re
from pathlib import Path

import pytest

from anlit.config.files import FOLDER
from tests.docs.pages import PAGES, ROOT, name

TOP_LEVEL = {
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "anlit",
    "configs",
    "docker",
    "docs",
    "pyproject.toml",
    "tests",
}
UNTRACKED = {".venv", "runs", "data", "build", "dist"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:anlit|configs|docs|tests|docker)/[\w./-]*")
_CONFIGURATION = re.compile(
    r"(?:model|attention|block|optimizer|runtime|trainer|experiment|study)/[\w/]+\.yaml"
)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert target.is_relative_to(ROOT), f"{name(page)} links out of the repository: {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)} links to the heading {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_named_path_exists(page: Path) -> None:
    for code in _CODE.findall(page.read_text(encoding="utf-8")):
        if _PATH.fullmatch(code):
            assert (ROOT / code).exists(), f"{name(page)} names {code}"
        if _CONFIGURATION.fullmatch(code):
            assert (FOLDER / code).is_file(), f"{name(page)} names the configuration {code}"


def test_contributing_names_what_the_code_has() -> None:
    """`NAME` and `anlit.module.name`: the last word is a word of a Python file."""
    words = set()
    for folder in ("anlit", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            words.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")

    names = re.findall(r"`(?:\w+\.)*([A-Za-z_]+)`", page)

    assert len(names) > 20
    assert set(names) - words == set()


def test_readme_fits_on_one_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert len(text.split()) <= 1250


def test_every_picture_of_the_results_is_shown_by_a_page() -> None:
    """Reports beside them keep their numbers only."""
    shown = set()
    for page in PAGES:
        shown |= {page.parent / link for link in _LINK.findall(page.read_text(encoding="utf-8"))}

    assert set((ROOT / "docs" / "results").rglob("*.png")) <= shown


def test_every_page_is_reached_from_the_readme() -> None:
    reached = [ROOT / "README.md"]
    for page in reached:
        links = _LINK.findall(page.read_text(encoding="utf-8"))
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links}
        for target in targets.difference(reached):
            if target.suffix == ".md" and target.is_file():
                reached.append(target)

    unreached = set((ROOT / "docs").rglob("*.md")).difference(reached)
    assert [name(page) for page in unreached] == []


def test_configs_are_yaml_files() -> None:
    assert {path.suffix for path in FOLDER.rglob("*") if path.is_file()} == {".yaml"}


def test_the_top_folder_has_no_other_entries() -> None:
    entries = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    installed = {entry for entry in entries if entry.endswith(".egg-info")}

    assert entries - UNTRACKED - installed == TOP_LEVEL


def test_every_path_of_tests_in_the_makefile_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    paths = re.findall(r"\btests/[\w/.]*", makefile)

    assert len(paths) > 2
    assert [path for path in paths if not (ROOT / path).exists()] == []
