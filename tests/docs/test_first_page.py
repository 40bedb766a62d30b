"""The tables of README follow from the records."""

import pytest

from tests.docs import first_page

TABLES = first_page.tables()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_readme_is_made_from_its_records(name: str) -> None:
    text = first_page.README.read_text(encoding="utf-8")

    assert first_page.table_in(text, name) == TABLES[name], "run python -m tests.docs.first_page"


def test_the_picture_shows_every_comparison() -> None:
    drawn = first_page.draw()

    texts = {text.get_text() for text in drawn.axes[0].texts}
    for comparison in first_page.COMPARISONS:
        assert {comparison.label, comparison.result} <= texts
    assert first_page.PICTURE.is_file()


def test_only_a_loss_that_no_seed_reaches_is_never_reached() -> None:
    results = {comparison.result for comparison in first_page.COMPARISONS}

    assert {"never reaches that loss", "1 of 3 seeds reach that loss"} <= results
