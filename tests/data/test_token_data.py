"""`TokenData`: every item once in a pass, the same order for any number of devices, a position."""

from collections import Counter
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from anlit import TokenData
from anlit.data.attributes import check_fits_model
from anlit.data.batch import IGNORE_INDEX, Batch
from anlit.errors import UserError
from tests.data.modules import Recorder, counted, quiet_trainer

N_ITEMS = 23


class Numbered(Dataset):
    """Item i has the tokens i, i + 1, …: i % 3 + 2 of them."""

    def __init__(self, n: int = N_ITEMS) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> np.ndarray:
        length = index % 3 + 2
        return np.arange(index, index + length, dtype=np.uint16)


class Iterated(IterableDataset):
    """The same items in order, with a position."""

    def __init__(self, n: int = N_ITEMS) -> None:
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


each_dataset = pytest.mark.parametrize("dataset", [Numbered, Iterated])


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
    epochs = repeat(data.train_dataloader())
    batches = chain.from_iterable(epochs)
    return list(islice(batches, count))


def rows_of(batches: list[Batch]) -> list[list[int]]:
    """Return the tokens of each row, without what fills it up."""
    rows = []
    for batch in batches:
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            counted_targets = targets[targets != IGNORE_INDEX]
            rows.append([int(tokens[0]), *counted_targets.tolist()])
    return rows


def first_rows(data: TokenData, n_batches: int) -> list[list[int]]:
    return rows_of(first_batches(data, n_batches))


def first_tokens(batches: list[Batch]) -> list[int]:
    tokens: list[int] = []
    for batch in batches:
        tokens += batch.tokens[:, 0].tolist()
    return tokens


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
    items = list(range(N_ITEMS))
    batches_of_two_passes = N_ITEMS  # of two items

    both_passes = first_tokens(first_batches(ready(), batches_of_two_passes))

    first_pass = both_passes[:N_ITEMS]
    second_pass = both_passes[N_ITEMS:]
    assert sorted(first_pass) == items
    assert sorted(second_pass) == items
    assert first_pass != second_pass
    assert first_pass != items
    other_seed = first_batches(ready(seed=1), batches_of_two_passes)
    assert first_tokens(other_seed) != both_passes


def test_without_shuffling_items_keep_their_order() -> None:
    batches = first_batches(ready(shuffle=False), 12)

    tokens = first_tokens(batches)
    assert tokens[:N_ITEMS] == list(range(N_ITEMS))


@each_dataset
@pytest.mark.parametrize("ranks", [2, 3])
def test_devices_share_the_order_of_one_device(dataset: type, ranks: int) -> None:
    """A global batch of all devices has the rows of a single device with the larger batch."""
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
    batches = first_batches(ready(), 9)

    data_of_workers = ready(num_workers=2)
    batches_of_workers = first_batches(data_of_workers, 9)
    data_of_workers.teardown("fit")  # garbage collection would wait for each worker

    assert rows_of(batches_of_workers) == rows_of(batches)


@each_dataset
@pytest.mark.parametrize("n_drawn", [3, 11, 12])
def test_a_saved_position_continues_with_the_next_batch(dataset: type, n_drawn: int) -> None:
    """Also in the next pass."""
    uninterrupted = first_rows(ready(train=dataset()), 20)
    state = state_after(dataset, n_drawn)

    continued = ready(train=dataset())
    continued.load_state_dict(state)

    rows = first_rows(continued, 20 - n_drawn)
    assert rows == uninterrupted[2 * n_drawn :]


@each_dataset
@pytest.mark.parametrize("n_drawn", [3, 11, 12])
def test_a_saved_position_continues_on_another_number_of_devices(
    dataset: type, n_drawn: int
) -> None:
    uninterrupted = first_rows(ready(train=dataset()), 20)
    state = state_after(dataset, n_drawn)

    rows = []
    for rank in range(2):
        data = ready(rank, 2, train=dataset(), batch_size=1)
        data.load_state_dict(state)
        rows += first_rows(data, 1)

    n_seen = 2 * n_drawn
    assert rows == uninterrupted[n_seen : n_seen + 2]


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

    other_data = ready(train=Numbered(22))
    other_seed = ready(seed=1)
    other_fingerprint = ready(fingerprint="other")
    for other in (other_data, other_seed, other_fingerprint):
        other.load_state_dict(state)
        with pytest.raises(UserError, match="position in the data is for"):
            other.train_dataloader()


@pytest.mark.parametrize(("ranks", "n_batches"), [(1, 12), (2, 6), (3, 4), (5, 3)])
def test_evaluation_has_every_target_once_on_any_number_of_devices(
    ranks: int, n_batches: int
) -> None:
    items = Numbered()
    expected: list[int] = []
    for index in range(N_ITEMS):
        expected += items[index][1:].tolist()

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


def test_an_iterable_dataset_is_read_in_this_process() -> None:
    data = ready(train=Iterated(), num_workers=1)

    with pytest.raises(UserError, match=r"set data\.num_workers to 0"):
        data.train_dataloader()


def test_an_iterable_dataset_needs_a_number_of_steps() -> None:
    data = ready(train=Iterated())
    data.trainer.max_steps = -1

    with pytest.raises(UserError, match=r"set trainer\.max_steps"):
        data.train_dataloader()


def test_an_iterable_dataset_without_items_is_refused() -> None:
    data = ready(train=Iterated(0))

    with pytest.raises(UserError, match="has no items"):
        first_batches(data, 1)


def test_rows_longer_than_the_models_context_are_refused_in_training() -> None:
    data = SimpleNamespace(context_length=17)
    model = SimpleNamespace(vocab_size=64, context_length=16)

    check_fits_model(data, model, trains=False)
    check_fits_model(SimpleNamespace(), model, trains=True)
    check_fits_model(SimpleNamespace(context_length=16), model, trains=True)

    with pytest.raises(UserError, match=r"context_length=17 is more than model\.context_length=16"):
        check_fits_model(data, model, trains=True)
