"""The documentation keeps its limits, and the files that it names exist."""

import re
import tomllib
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
UNTRACKED = {".venv", "runs", "data", "build", "dist", "texts"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:anlit|configs|docs|tests|docker)/[\w./-]*")
_CONFIGURATION = re.compile(
    r"(?:model|attention|block|optimizer|runtime|trainer|experiment|study)/[\w/]+\.yaml"
)


def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def links_of(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return _LINK.findall(text_of(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    names = set()
    for heading in re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(words.replace(" ", "-"))
    return names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in links_of(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert target.is_relative_to(ROOT), f"{name(page)} links out of the repository: {link}"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to the heading {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_named_path_exists(page: Path) -> None:
    for code in _CODE.findall(text_of(page)):
        if _PATH.fullmatch(code):
            assert (ROOT / code).exists(), f"{name(page)} names {code}"
        if _CONFIGURATION.fullmatch(code):
            assert (FOLDER / code).is_file(), f"{name(page)} names the configuration {code}"


def test_contributing_names_what_the_code_has() -> None:
    """`NAME` and `anlit.module.name`: the last word is a word of a Python file."""
    words = set()
    for folder in ("anlit", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            words.update(re.findall(r"\w+", text_of(file)))
    page = text_of(ROOT / "docs" / "contributing.md")

    names = re.findall(r"`(?:\w+\.)*([A-Za-z_]+)`", page)

    assert len(names) > 20
    assert set(names) - words == set()


def test_readme_fits_on_one_page() -> None:
    text = text_of(ROOT / "README.md")

    assert len(text.splitlines()) <= 180
    assert len(text.split()) <= 1250


def test_every_configuration_is_named_by_a_page() -> None:
    """Files of experiment/ by their folder, others by their path."""
    text = "".join(text_of(page) for page in PAGES)
    unnamed = []
    for file in sorted(FOLDER.rglob("*.yaml")):
        path = file.relative_to(FOLDER)
        name_in_pages = f"{path.parts[1]}/" if len(path.parts) == 3 else path.as_posix()
        if name_in_pages not in text:
            unnamed.append(path.as_posix())

    assert unnamed == []


def test_train_md_names_every_metric() -> None:
    """`train/…` and `val/…` by their whole names, others by the words before the slash."""
    page = text_of(ROOT / "docs" / "train.md").split("## What is logged")[1]
    unnamed = set()
    for file in (ROOT / "anlit" / "training").rglob("*.py"):
        for kind, metric in re.findall(r'"([a-z]{2,})/(\w*)[^"]*"', text_of(file)):
            is_usual = kind in ("train", "val")
            name_in_page = f"`{kind}/{metric}" if is_usual else f"`{kind}/"
            if kind != "anlit" and name_in_page not in page:
                unnamed.add(name_in_page)

    assert unnamed == set()


def test_pages_name_the_extras_of_the_package() -> None:
    """`triton` comes with torch for GPUs; `test` and `dev` belong to `make test`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"triton", "test", "dev"}
    text = "".join(text_of(page) for page in PAGES)

    named = set(re.findall(r"EXTRAS=(\w+)", text))

    assert named == extras


def test_every_picture_of_the_results_is_shown_by_a_page() -> None:
    """Reports beside them keep their numbers only."""
    shown = set()
    for page in PAGES:
        shown |= {page.parent / link for link in links_of(page)}

    pictures = set((ROOT / "docs" / "results").rglob("*.png"))
    assert pictures <= shown


def test_every_page_is_reached_from_the_readme() -> None:
    reached = [ROOT / "README.md"]
    for page in reached:
        targets = set()
        for link in links_of(page):
            path, _, _ = link.partition("#")
            targets.add((page.parent / path).resolve())
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
