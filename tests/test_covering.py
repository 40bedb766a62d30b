"""What the marker `covering` leaves among the fast tests."""

import itertools

import pytest

from tests.covering import covering

PRODUCT = list(itertools.product("abcdef", (0, 1), (True, False, None)))


@pytest.mark.parametrize(("strength", "at_most"), [(1, 6), (2, 20), (3, len(PRODUCT)), (9, len(PRODUCT))])
def test_a_few_rows_have_every_combination(strength: int, at_most: int) -> None:
    chosen = [PRODUCT[index] for index in covering(PRODUCT, strength)]
    assert len(chosen) <= at_most
    for columns in itertools.combinations(range(3), min(strength, 3)):
        some, every = ({tuple(row[i] for i in columns) for row in rows} for rows in (chosen, PRODUCT))
        assert some == every
