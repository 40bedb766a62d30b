"""The documentation keeps to its limits, and everything that it names exists."""

import re
from pathlib import Path

import pytest

from anlit.config.files import FOLDER
from tests.docs.pages import PAGES, ROOT, name

TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "CONTRIBUTING.md", "CITATION.cff", "CHANGELOG.md", "anlit", "configs",
    "docs", "tests", "docker", "Makefile",
}  # fmt: skip
NOT_OURS = {".venv", "runs", "data", "build", "dist"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_OWN_PATH = re.compile(r"(?:anlit|configs|docs|tests|docker)/[\w./-]*")
_SHIPPED = re.compile(
    r"(?:model|attention|block|optimizer|runtime|trainer|experiment|study)/[\w/]+\.yaml"
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
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
def test_every_path_that_is_named_exists(page: Path) -> None:
    for code in _CODE.findall(page.read_text(encoding="utf-8")):
        if _OWN_PATH.fullmatch(code):
            assert (ROOT / code).exists(), f"{name(page)} names {code}"
        if _SHIPPED.fullmatch(code):
            assert (FOLDER / code).is_file(), f"{name(page)} names the configuration {code}"


def test_readme_fits_on_one_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    assert len(text.split()) <= 1250


def test_every_picture_of_the_results_is_shown_by_a_page() -> None:
    """Reports beside them keep their numbers only."""
    shown = {
        page.parent / link
        for page in PAGES
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert set((ROOT / "docs" / "results").rglob("*.png")) <= shown


def test_every_page_is_reached_from_the_readme() -> None:
    reached = [ROOT / "README.md"]
    for page in reached:
        links = _LINK.findall(page.read_text(encoding="utf-8"))
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links}
        reached += [
            target
            for target in targets.difference(reached)
            if target.suffix == ".md" and target.is_file()
        ]
    assert {name(page) for page in set((ROOT / "docs").rglob("*.md")).difference(reached)} == set()


def test_folders_hold_what_they_may() -> None:
    assert {path.suffix for path in FOLDER.rglob("*") if path.is_file()} == {".yaml"}
    entries = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert (
        entries - NOT_OURS - {entry for entry in entries if entry.endswith(".egg-info")}
        == TOP_LEVEL
    )
