"""What each query may see, worked out by hand."""

import pytest
import torch

from anlit.attention.documents import Documents

IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])
CPU = torch.device("cpu")


def test_counts_and_positions_restart_with_each_document() -> None:
    documents = Documents(IDS, 6, CPU)
    assert documents.n_visible(torch.float64).tolist() == [[1, 2, 1, 2, 3, 1], [1, 2, 3, 4, 5, 6]]
    assert documents.positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    one_text = Documents(None, 4, CPU)
    assert one_text.n_visible(torch.float32).tolist() == [[1, 2, 3, 4]]
    assert (one_text.positions, one_text.are_masked) == (None, False)


def test_a_query_sees_the_past_of_its_own_document() -> None:
    first, second = Documents(IDS, 6, CPU).mask()[:, 0].int().tolist()
    assert first == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert second == [[int(j <= i) for j in range(6)] for i in range(6)]
    assert torch.equal(Documents(None, 6, CPU).mask()[:, 0].int(), torch.tensor([second]))


def test_a_block_of_queries_is_a_part_of_the_whole_mask() -> None:
    for ids in (IDS, None):
        documents = Documents(ids, 6, CPU)
        for first, end in [(0, 2), (2, 5), (5, 6), (0, 6)]:
            assert torch.equal(documents.visible(first, end), documents.mask()[:, :, first:end, :end])


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_counts_are_the_sums_of_the_mask(window) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(5, 40, generator=generator) < 0.15).cumsum(1)
    documents = Documents(ids, 40, CPU)
    assert torch.equal(documents.mask(window)[:, 0].sum(-1), documents.n_visible(torch.int64, window))


def test_a_window_leaves_the_latest_keys() -> None:
    documents = Documents(IDS, 6, CPU)
    assert documents.n_visible(torch.int64, 2).tolist() == [[1, 2, 1, 2, 2, 1], [1, 2, 2, 2, 2, 2]]
    first, second = documents.mask(2)[:, 0].int().tolist()
    assert first[4] == [0, 0, 0, 1, 1, 0]
    assert second == [[int(i - 2 < j <= i) for j in range(6)] for i in range(6)]
    assert torch.equal(documents.visible(3, 6, 2, first_key=2), documents.mask(2)[:, :, 3:6, 2:6])
    assert not torch.equal(documents.mask(2), documents.mask())
