"""One style: a name keeps its colour and marker, files come in pairs, labels are no formulas."""

from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from PIL import Image

from anlit.reporting.figure import (
    ARCHITECTURES,
    COLUMN_WIDTH,
    MECHANISMS,
    TEXT_WIDTH,
    legend_below,
    line_styles,
    save,
    style,
)


@pytest.mark.parametrize(
    "labels",
    [
        ["anGPT, plain", "GPT+, plain"],
        ["GPT+", "nGPT, scale-invariant", "anGPT, plain", "anGPT, LogN, lr=1"],
        [name + mechanism for name in ARCHITECTURES for mechanism in ("", ", scale-invariant")],
        [f"{name}, lr={n}" for name in ARCHITECTURES for n in range(3)],
    ],
)
def test_an_architecture_has_the_same_colour_in_every_figure(labels: list[str]) -> None:
    for label, line_style in line_styles(labels).items():
        architecture = label.split(",")[0]
        colour, _ = ARCHITECTURES[architecture]
        assert line_style.colour == colour


@pytest.mark.parametrize(
    "labels",
    [
        [f"anGPT, lr={n}" for n in range(7)],
        ["GPT+", "GPT+, no QK-norm", "nGPT", "nGPT, norms bounded", "anGPT", "anGPT, gain, lr=1"],
        ["GPT+, ALiBi", "GPT+, no positions", "GPT+, window", "GPT+, p-RoPE", "GPT+, log bias"],
        ["first", "second", "third", "fourth", "fifth", "GPT+", "anGPT"],
    ],
)
def test_as_many_lines_as_the_palette_has_colours_differ_in_colour(labels: list[str]) -> None:
    styles = line_styles(labels)

    colours = {look.colour for look in styles.values()}
    assert len(colours) == len(labels)
    for name, (colour, _) in ARCHITECTURES.items():
        if name in labels:
            assert styles[name].colour == colour


def test_beside_other_architectures_a_mechanism_has_its_marker() -> None:
    styles = line_styles(["GPT+", "nGPT, scale-invariant", "anGPT, plain"])

    _, marker = MECHANISMS["scale-invariant"]
    assert styles["nGPT, scale-invariant"].marker == marker


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_alone_has_its_marker_in_any_order(order: int) -> None:
    labels = ["anGPT, gain", "anGPT", "GPT+"][::order]

    styles = line_styles(labels)

    assert list(styles) == labels
    assert styles["anGPT"].marker == ARCHITECTURES["anGPT"][1]
    assert styles["anGPT, gain"].marker != styles["anGPT"].marker


def test_a_mechanism_of_one_architecture_has_its_colour_and_marker_in_each_spelling() -> None:
    mechanisms = {
        "anGPT, plain": "plain",
        "anGPT, scale-invariant": "scale-invariant",
        "anGPT, √(2 log n), RoPE": "SqrtLogN",
        "anGPT, ALiBi, RoPE": "ALiBi",
        "anGPT, log bias, RoPE": "log-bias",
        "anGPT, plain, dynamic NTK": "dynamic NTK",
    }

    styles = line_styles(list(mechanisms))

    for label, mechanism in mechanisms.items():
        colour, marker = MECHANISMS[mechanism]
        assert (styles[label].colour, styles[label].marker) == (colour, marker)


@pytest.mark.parametrize(
    "labels",
    [
        [
            "GPT+, plain, lr=1",
            "GPT+, plain, lr=2",
            "first",
            "second",
            "GPT+, plain, lr=4",
            "anGPT, plain",
        ],
        [f"anGPT, lr={n}" for n in range(6)],
    ],
)
def test_no_two_lines_are_alike(labels: list[str]) -> None:
    looks = line_styles(labels).values()

    colours_and_markers = {(look.colour, look.marker) for look in looks}
    colours_and_dashes = {(look.colour, look.dash) for look in looks}
    assert len(colours_and_markers) == 6
    assert len(colours_and_dashes) == 6


def test_no_two_of_many_lines_of_one_colour_are_alike() -> None:
    labels = [f"anGPT, lr={n}" for n in range(20)]

    assert len(set(line_styles(labels).values())) == 20


LONG_LABEL = "anGPT, gain on q and k, unit norm of each head's average of values, twice the rate"


@pytest.mark.parametrize("width", [COLUMN_WIDTH, TEXT_WIDTH])
@pytest.mark.parametrize("length", [5, 20, 45, len(LONG_LABEL)])
def test_a_legend_lies_within_its_figure(width: float, length: int) -> None:
    with style(8):
        figure, axes = plt.subplots(figsize=(width, 3))
        for number in range(7):
            axes.plot([0, 1], [number, number], label=f"{number} {LONG_LABEL[:length]}")

        legend_below(figure, axes.get_lines(), columns=3)

        figure.draw_without_rendering()
        (legend,) = figure.legends
        extent = legend.get_window_extent()
        assert 0 <= extent.x0 < extent.x1 <= figure.bbox.width
        plt.close(figure)


def test_a_figure_is_written_for_pages_and_for_papers(tmp_path: Path) -> None:
    with style():
        figure, ax = plt.subplots()
        not_a_formula = "costs $x^{ and $y"
        ax.loglog([1, 1000], [1, 1000], label=not_a_formula)
        ax.set_title("a $ b $ c")
        figure.legend()
        save(figure, tmp_path / "a.png")

    with Image.open(tmp_path / "a.png") as image:
        assert (image.format, image.mode) == ("PNG", "P")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert not plt.fignum_exists(figure.number)
