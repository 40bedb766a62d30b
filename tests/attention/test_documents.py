"""What each query may see, worked out by hand."""

import pytest
import torch

from anlit.attention.documents import Documents

IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])
CPU = torch.device("cpu")


def test_counts_and_positions_restart_with_each_document() -> None:
    documents, one_text = Documents(IDS, 6, CPU), Documents(None, 4, CPU)
    assert documents.n_visible(torch.float64).tolist() == [[1, 2, 1, 2, 3, 1], [1, 2, 3, 4, 5, 6]]
    assert documents.n_visible(torch.int64, 2).tolist() == [[1, 2, 1, 2, 2, 1], [1, 2, 2, 2, 2, 2]]
    assert documents.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert one_text.n_visible(torch.float32).tolist() == [[1, 2, 3, 4]]
    assert (one_text.positions, one_text.are_masked) == (None, False)


@pytest.mark.parametrize("window", [None, 2])
def test_a_query_sees_the_latest_keys_of_its_own_document(window) -> None:
    begins = [0, 0, 2, 2, 2, 5]
    expected = [
        [[int(max(begin, i - (window or 6) + 1) <= j <= i) for j in range(6)] for i, begin in enumerate(row)]
        for row in (begins, [0] * 6)
    ]
    assert Documents(IDS, 6, CPU).mask(window)[:, 0].int().tolist() == expected
    assert Documents(None, 6, CPU).mask(window)[0, 0].int().tolist() == expected[1]
