"""The table of mechanisms in docs/attention.md gives the settings of the fragments."""

import re

import pytest
import yaml

import anlit
from anlit.config.files import FOLDER
from anlit.config.objects import build_from_plain, module_to_plain_values
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\|.*\| `(\w+\(.*?\))` \|.*\| `(attention/\w+\.yaml)` \|$", PAGE, re.MULTILINE)
"""Class with its settings, and fragment, of each row."""


def test_the_table_has_a_row_for_every_mechanism() -> None:
    assert len(ROWS) == 10


@pytest.mark.parametrize(("call", "fragment"), ROWS)
def test_a_row_gives_the_settings_of_its_fragment(call: str, fragment: str) -> None:
    settings = yaml.safe_load((FOLDER / fragment).read_text(encoding="utf-8"))["model"]["init_args"]
    names = {name: getattr(anlit, name) for name in dir(anlit)}

    of_page = eval(call, {"__builtins__": {}}, names)
    kind = names[settings["attention"]["class_path"].removeprefix("anlit.")]
    of_fragment = build_from_plain(kind, settings["attention"].get("init_args", {}), fragment)

    assert module_to_plain_values(of_page) == module_to_plain_values(of_fragment)


@pytest.mark.parametrize(("call", "fragment"), ROWS)
def test_the_page_says_which_fragments_set_positions(call: str, fragment: str) -> None:
    settings = yaml.safe_load((FOLDER / fragment).read_text(encoding="utf-8"))["model"]["init_args"]
    paragraph = PAGE.split("Some fragments also set")[1].split("\n\n")[0]

    is_named = f"`{fragment.removeprefix('attention/')}`" in paragraph

    assert is_named == ("positions" in settings)
