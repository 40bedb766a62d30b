"""Numbers in tables and log lines."""

import math

import pytest

from anlit.commands.metrics_table import metrics_table
from anlit.reporting.text import minus, short_number, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00123456, "0.00123"),
        (12.345, "12.3"),
        (999.4, "999"),
        (999.6, "1k"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_700, "1M"),
        (-999_700, "-1M"),
        (2.5e9, "2.5B"),
        (9_999e12, "9,999T"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_short_numbers_take_the_suffix_of_what_they_round_to(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (999.4, "999"), (999.6, "1,000"), (1979.2, "1,979"), (-1979.2, "-1,979")],
)
def test_large_numbers_with_three_digits_have_no_exponent(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_metrics_of_an_evaluation_have_six_digits_and_a_column_for_each_loader() -> None:
    first = {
        "val/loss/dataloader_idx_0": 5.564042448997498,
        "val/tokens/dataloader_idx_0": 4194304.0,
    }
    second = {"val/loss/dataloader_idx_1": -0.1234567891, "val/seconds": 1.0}

    table = metrics_table([first, second])

    assert table.head == ["metric", "loader 0", "loader 1"]
    assert table.rows == [
        ["val/loss", "5.56404", "−0.123457"],
        ["val/seconds", "–", "1"],
        ["val/tokens", "4,194,304", "–"],
    ]
    assert metrics_table([first]).head == ["metric", "value"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-0.5", "−0.5"),
        ("-0.5 (-0.8 … +0.1)", "−0.5 (−0.8 … +0.1)"),
        ("1e-05", "1e-05"),
        ("-1e-05", "−1e-05"),
    ],
)
def test_negative_numbers_have_a_minus_sign_and_exponents_a_hyphen(
    text: str, expected: str
) -> None:
    assert minus(text) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(1_234_567.5, "1,234,568"), (-12_345_678.9, "−12,345,679"), (123_456.75, "123,457")],
)
def test_a_large_metric_has_no_exponent(value: float, text: str) -> None:
    assert metrics_table([{"val/perplexity": value}]).rows == [["val/perplexity", text]]
