"""The page holds its own pictures and loads nothing."""

import base64
import re
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from anlit.reporting.page import html


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "report" / "lengths"
    inner.mkdir(parents=True)
    for file in (tmp_path / "outside.png", inner.parent / "own.png", inner / "lengths.png"):
        figure = plt.figure(figsize=(3, 1))
        figure.savefig(file, dpi=150)
        plt.close(figure)
    return inner.parent


def test_own_pictures_are_inside_and_no_others(folder: Path) -> None:
    own = "![mine](own.png) ![inner](lengths/lengths.png)"
    others = "![up](../outside.png) ![root](/etc/x.png) ![missing](missing.png) ![remote](http://evil/x.png)"
    page = html(
        f"# Title\n\n{own}\n\n{others}\n\n![data](data:image/png;base64,AAAA) ![svg](own.svg)",
        folder,
    )
    pictures = re.findall(
        r'<img src="data:image/png;base64,([^"]*)" width="(\d+)" alt="(\w+)">', page
    )
    assert [(width, alt) for _, width, alt in pictures] == [("288", "mine"), ("288", "inner")]
    assert base64.b64decode(pictures[0][0]) == (folder / "own.png").read_bytes()
    assert page.count("<img") == 2
    assert "up root missing" in " ".join(page.split())
    assert (
        'http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;' in page
    )


def test_headings_html_and_links_are_shown_as_they_are(folder: Path) -> None:
    hostile = "<script>alert(1)</script> [l](http://evil) <http://evil>"
    page = html(f"# <b>T</b>\n\n{hostile}\n\n## A <i> `b`\n\ntext", folder)
    assert "<title>&lt;b&gt;T&lt;/b&gt;</title>" in page
    assert ("&lt;script&gt;" in page, "<script" in page) == (True, False)
    assert '<a href="#s0">A &lt;i&gt; b</a>' in page
    assert 'href="http' not in page
