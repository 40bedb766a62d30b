"""One look: colours and markers belong to names, files come in pairs, labels are no formulas."""

from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from PIL import Image

from anlit.reporting.figure import ARCHITECTURES, MECHANISMS, line_styles, save, style


def test_an_architecture_has_its_colour_in_every_figure() -> None:
    few, many = (
        ["anGPT, plain", "GPT+, plain"],
        ["GPT+", "nGPT, scale-invariant", "anGPT, plain", "anGPT, LogN, lr=1"],
    )
    for label, look in [*line_styles(few).items(), *line_styles(many).items()]:
        assert look.colour == ARCHITECTURES[label.split(",")[0]][0]
    assert line_styles(many)["nGPT, scale-invariant"].marker == MECHANISMS["scale-invariant"][1]


def test_mechanisms_of_one_architecture_have_theirs_however_they_are_written() -> None:
    labels = {
        "anGPT, plain": "plain", "anGPT, scale-invariant": "scale-invariant", "anGPT, √(2 log n), RoPE": "SqrtLogN",
        "anGPT, ALiBi, RoPE": "ALiBi", "anGPT, log bias, RoPE": "log-bias", "anGPT, plain, dynamic NTK": "dynamic NTK",
    }  # fmt: skip
    styles = line_styles(list(labels))
    assert {label: styles[label][:2] for label in labels} == {
        label: MECHANISMS[name] for label, name in labels.items()
    }


@pytest.mark.parametrize("labels", [
    ["GPT+, plain, lr=1", "GPT+, plain, lr=2", "first", "second", "GPT+, plain, lr=4", "anGPT, plain"],
    [f"anGPT, lr={n}" for n in range(6)],
])  # fmt: skip
def test_no_two_lines_look_alike(labels: list[str]) -> None:
    looks = line_styles(labels).values()
    assert (
        len({(look.colour, look.marker) for look in looks})
        == len({(look.colour, look.dash) for look in looks})
        == 6
    )


def test_a_figure_is_written_for_pages_and_for_papers(tmp_path: Path) -> None:
    with style():
        figure, ax = plt.subplots()
        ax.loglog(
            [1, 1000], [1, 1000], label="costs $x^{ and $y"
        )  # as a formula it could not be parsed
        ax.set_title("a $ b $ c")
        figure.legend()
        save(figure, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert (image.format, image.mode) == ("PNG", "P")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert not plt.fignum_exists(figure.number)
