"""The page holds the pictures of its folder and loads nothing."""

import base64
import re
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from anlit.reporting.page import html

IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]*)" width="(\d+)" alt="(\w+)">')
INSIDE = "![picture](picture.png) ![inner](lengths/lengths.png)"
OUTSIDE = (
    "![up](../outside.png) ![root](/etc/x.png) ![missing](missing.png) "
    "![remote](http://evil/x.png) ![data](data:image/png;base64,AAAA) ![svg](picture.svg)"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A report's folder with two pictures, and a picture outside."""
    report = tmp_path / "report"
    (report / "lengths").mkdir(parents=True)
    files = (
        tmp_path / "outside.png",
        report / "picture.png",
        report / "lengths" / "lengths.png",
    )
    for file in files:
        figure = plt.figure(figsize=(3, 1))
        figure.savefig(file, dpi=150)
        plt.close(figure)
    return report


def test_pictures_of_the_folder_are_inside_the_page(folder: Path) -> None:
    page = html(f"# Title\n\n{INSIDE}", folder)

    first, second = IMAGE.findall(page)
    content, *width_and_text = first
    assert base64.b64decode(content) == (folder / "picture.png").read_bytes()
    assert width_and_text == ["288", "picture"]
    assert second[1:] == ("288", "inner")


def test_all_other_pictures_are_shown_as_their_text(folder: Path) -> None:
    page = html(f"# Title\n\n{OUTSIDE}", folder)

    assert "<img" not in page
    assert "up root missing" in " ".join(page.split())


def test_the_page_may_load_nothing(folder: Path) -> None:
    page = html("# Title", folder)

    policy = "content=\"default-src 'none'; img-src data:;"
    assert f'http-equiv="Content-Security-Policy" {policy}' in page


def test_headings_html_and_links_are_shown_literally(folder: Path) -> None:
    hostile = "<script>alert(1)</script> [l](http://evil) <http://evil>"

    page = html(f"# <b>T</b>\n\n{hostile}\n\n## A <i> `b`\n\ntext", folder)

    assert "<title>&lt;b&gt;T&lt;/b&gt;</title>" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<h2>A &lt;i&gt; <code>b</code></h2>" in page
    assert "href=" not in page
