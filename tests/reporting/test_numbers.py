"""Numbers in tables and log lines."""

import math

import pytest

from anlit.reporting.text import short_number, three_digits


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
