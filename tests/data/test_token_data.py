"""`TokenData`: every item once in a pass, one order for any number of devices, a position."""

from collections import Counter
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from anlit import TokenData
from anlit.data.batch import IGNORE_INDEX, Batch
from anlit.errors import UserError
from tests.data.modules import Recorder, counted, quiet_trainer

VOCABULARY = 1000


class Numbered(Dataset):
    """Item i has i % 3 + 2 tokens, of which the first is i."""

    def __init__(self, n: int = 23) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(index, index + index % 3 + 2, dtype=np.uint16)


class Iterated(IterableDataset):
    """The same items in order, with a position."""

    def __init__(self, n: int = 23) -> None:
        self.items = Numbered(n)
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < len(self.items):
            self.position += 1
            yield self.items[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def ready(rank: int = 0, ranks: int = 1, **settings: Any) -> TokenData:
    """Return data after setup, as on a rank."""
    data = TokenData(**{"train": Numbered(), "batch_size": 2, **settings})
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks},
        accumulate_grad_batches=1,
        max_steps=10,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup("fit")
    return data


def first_batches(data: TokenData, count: int) -> list[Batch]:
    """Return the first batches of training, over several epochs."""
    loader = data.train_dataloader()
    return list(islice(chain.from_iterable(repeat(loader)), count))


def rows_of(batches: list[Batch]) -> list[list[int]]:
    """Return the tokens of each row, without what fills it up."""
    rows = []
    for batch in batches:
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            counted_targets = [target for target in targets if target != IGNORE_INDEX]
            rows.append([tokens[0], *counted_targets])
    return rows


def first_tokens(batches: list[Batch]) -> list[int]:
    rows = chain.from_iterable(batch.tokens.tolist() for batch in batches)
    return [row[0] for row in rows]


def test_rows_are_shifted_and_filled_up_with_what_does_not_count() -> None:
    data = ready(train=[[1, 2, 3], [4, 5]], shuffle=False)

    (batch,) = first_batches(data, 1)

    assert batch.tokens.tolist() == [[1, 2], [4, 5]]
    assert batch.targets.tolist() == [[2, 3], [5, -100]]
    assert batch.document_ids.eq(0).all()


def test_a_separator_ends_documents_inside_of_an_item() -> None:
    data = ready(train=[[1, 0, 2, 3]], batch_size=1, end_of_document=0)

    (batch,) = first_batches(data, 1)

    assert batch.document_ids.tolist() == [[0, 0, 1]]


def test_each_pass_has_every_item_once_in_an_order_of_the_seed() -> None:
    items = list(range(23))
    batches_of_two_passes = 23

    both_passes = first_tokens(first_batches(ready(), batches_of_two_passes))

    first_pass = both_passes[:23]
    second_pass = both_passes[23:]
    assert sorted(first_pass) == items
    assert sorted(second_pass) == items
    assert first_pass != second_pass
    assert first_pass != items
    other_seed = first_batches(ready(seed=1), batches_of_two_passes)
    assert first_tokens(other_seed) != both_passes


def test_without_shuffling_items_keep_their_order() -> None:
    batches = first_batches(ready(shuffle=False), 12)

    assert first_tokens(batches)[:23] == list(range(23))


@pytest.mark.parametrize("dataset", [Numbered, Iterated])
@pytest.mark.parametrize("ranks", [2, 3])
def test_devices_share_the_order_of_one_device(dataset: type, ranks: int) -> None:
    """A global batch of all devices has the rows of one device with the larger batch."""
    single = ready(train=dataset(), batch_size=2 * ranks)
    expected = first_tokens(first_batches(single, 20))

    batches_by_rank = []
    for rank in range(ranks):
        data = ready(rank, ranks, train=dataset())
        batches_by_rank.append(first_batches(data, 20))

    tokens = []
    for global_batch in zip(*batches_by_rank, strict=True):
        tokens += first_tokens(list(global_batch))
    assert tokens == expected


def test_workers_do_not_change_the_batches() -> None:
    expected = rows_of(first_batches(ready(), 9))

    assert rows_of(first_batches(ready(num_workers=2), 9)) == expected


@pytest.mark.parametrize("dataset", [Numbered, Iterated])
@pytest.mark.parametrize("n_drawn", [3, 11, 12])
def test_a_saved_position_continues_with_the_next_batch(dataset: type, n_drawn: int) -> None:
    """Also in the next pass."""
    uninterrupted = rows_of(first_batches(ready(train=dataset()), 20))
    state = state_after(dataset, n_drawn)

    continued = ready(train=dataset())
    continued.load_state_dict(state)

    rows = rows_of(first_batches(continued, 20 - n_drawn))
    assert rows == uninterrupted[2 * n_drawn :]


@pytest.mark.parametrize("dataset", [Numbered, Iterated])
@pytest.mark.parametrize("n_drawn", [3, 11, 12])
def test_a_saved_position_continues_on_another_number_of_devices(
    dataset: type, n_drawn: int
) -> None:
    uninterrupted = rows_of(first_batches(ready(train=dataset()), 20))
    state = state_after(dataset, n_drawn)

    batches = []
    for rank in range(2):
        data = ready(rank, 2, train=dataset(), batch_size=1)
        data.load_state_dict(state)
        batches += first_batches(data, 1)

    first_row = 2 * n_drawn
    assert rows_of(batches) == uninterrupted[first_row : first_row + 2]


def state_after(dataset: type, n_drawn: int) -> dict[str, Any]:
    """The position after some batches on a single device."""
    data = ready(train=dataset())
    first_batches(data, n_drawn)
    return data.state_dict()


def test_a_trainer_stops_and_continues_with_the_same_batches(tmp_path) -> None:
    def fit(n_steps: int, continued: bool) -> Recorder:
        model = Recorder()
        trainer = quiet_trainer(max_steps=n_steps, default_root_dir=tmp_path)
        data = TokenData(Numbered(), batch_size=2)
        checkpoint = tmp_path / "position.ckpt" if continued else None
        trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / "position.ckpt")
        return model

    uninterrupted = fit(20, continued=False).seen
    first_part = fit(14, continued=False).seen
    second_part = fit(20, continued=True).seen
    assert first_part + second_part == uninterrupted


def test_a_position_of_other_data_is_refused() -> None:
    state = state_after(Numbered, n_drawn=1)

    for settings in ({"train": Numbered(22)}, {"seed": 1}, {"fingerprint": "other"}):
        other = ready(**settings)
        other.load_state_dict(state)
        with pytest.raises(UserError, match="position in the data is for"):
            other.train_dataloader()


@pytest.mark.parametrize(("ranks", "n_batches"), [(1, 12), (2, 6), (3, 4), (5, 3)])
def test_evaluation_has_every_target_once_on_any_number_of_devices(
    ranks: int, n_batches: int
) -> None:
    expected = []
    for index in range(23):
        expected += Numbered()[index][1:].tolist()

    targets: list[int] = []
    for rank in range(ranks):
        batches = list(ready(rank, ranks, val=Numbered()).val_dataloader())
        assert len(batches) == n_batches, "all devices stay in step"
        targets += counted(batches)
    assert Counter(targets) == Counter(expected)


@pytest.mark.parametrize(
    "item",
    [
        [1, 2, 3],
        np.array([1, 2, 3], dtype=np.int32),
        torch.tensor([1, 2, 3]),
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        TensorDataset(torch.tensor([[1, 2, 3]]))[0],
    ],
)
def test_an_item_is_an_array_of_tokens_in_any_form(item: Any) -> None:
    (batch,) = first_batches(ready(train=[item], batch_size=1), 1)

    assert batch.tokens.tolist() == [[1, 2]]
    assert batch.targets.tolist() == [[2, 3]]


@pytest.mark.parametrize(
    "item",
    [
        pytest.param([1], id="one token"),
        pytest.param([[1, 2]], id="two axes"),
        pytest.param([[1], [2, 3]], id="two rows"),
        pytest.param([0.5, 1.0], id="fractions"),
        pytest.param("text", id="text"),
        pytest.param({"text": "a"}, id="without input_ids"),
    ],
)
def test_another_item_is_refused(item: Any) -> None:
    with pytest.raises(UserError, match=r"TokenData has an item that is a .*: give two or"):
        first_batches(ready(train=[item], batch_size=1), 1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train": []}, r"TokenData\.train is empty"),
        ({"train": 5}, r"TokenData\.train is a int: give a dataset with"),
        ({"val": Iterated()}, r"TokenData\.val is a Iterated: .* only train may be iterable"),
        ({"batch_size": 0}, r"data\.batch_size=0 is out of range"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ready(**settings)


def test_an_iterable_dataset_needs_steps_and_this_process() -> None:
    with pytest.raises(UserError, match=r"set data\.num_workers to 0"):
        ready(train=Iterated(), num_workers=1).train_dataloader()
    data = ready(train=Iterated())
    data.trainer.max_steps = -1
    with pytest.raises(UserError, match=r"set trainer\.max_steps"):
        data.train_dataloader()
    with pytest.raises(UserError, match="has no items"):
        first_batches(ready(train=Iterated(0)), 1)
