"""One look: colours and markers belong to names, files come in pairs, labels are no formulas."""

from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from PIL import Image

from anlit.configuration import attention_label
from anlit.reporting.figure import ARCHITECTURES, MECHANISMS, line_styles, save, style


def test_an_architecture_has_its_colour_in_every_figure() -> None:
    few, many = ["anGPT, plain", "GPT+, plain"], ["GPT+", "nGPT, scale-invariant", "anGPT, plain", "anGPT, LogN, lr=1"]
    for labels in (few, many):
        for label, look in line_styles(labels).items():
            name = label.split(",")[0]
            assert look.colour == ARCHITECTURES[name][0]
    assert line_styles(many)["nGPT, scale-invariant"].marker == MECHANISMS["scale-invariant"][1]


def test_mechanisms_of_one_architecture_have_theirs() -> None:
    labels = ["anGPT, plain", "anGPT, scale-invariant", "anGPT, plain, dynamic NTK"]
    found = line_styles(labels)
    assert [found[label][:2] for label in labels] == [
        MECHANISMS["plain"],
        MECHANISMS["scale-invariant"],
        MECHANISMS["dynamic NTK"],
    ]
    assert found["anGPT, scale-invariant"] == line_styles(labels[:2])["anGPT, scale-invariant"]


@pytest.mark.parametrize("labels", [
    ["GPT+, plain, lr=1", "GPT+, plain, lr=2", "first", "second", "GPT+, plain, lr=4", "anGPT, plain"],
    [f"anGPT, lr={n}" for n in range(6)],
])  # fmt: skip
def test_no_two_lines_look_alike(labels: list[str]) -> None:
    found = line_styles(labels).values()
    assert len({(look.colour, look.marker) for look in found}) == len({(look.colour, look.dash) for look in found}) == 6


def test_a_figure_is_written_for_pages_and_for_papers(tmp_path: Path) -> None:
    with style():
        figure, ax = plt.subplots()
        ax.loglog([1, 1000], [1, 1000], label="costs $x^{ and $y")  # as a formula it could not be parsed
        ax.set_title("a $ b $ c")
        figure.legend()
        save(figure, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert (image.format, image.mode) == ("PNG", "P")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert not plt.fignum_exists(figure.number)


def test_a_mechanism_has_its_name_and_look_however_it_is_written() -> None:
    for label, name in (("ALiBi, RoPE", "ALiBi"), ("√(2 log n), RoPE", "SqrtLogN"), ("log bias, RoPE", "log-bias")):
        found = line_styles([label, "plain", "scale-invariant"])[label]
        assert (found.colour, found.marker) == MECHANISMS[name]
    names = ["ALiBi", "alibi", "log_n", "LogN", "sqrt_log_n", "ScaleInvariant"]
    assert [attention_label(name) for name in names] == [
        "ALiBi", "ALiBi", "LogN", "LogN", "SqrtLogN", "scale-invariant",
    ]  # fmt: skip
