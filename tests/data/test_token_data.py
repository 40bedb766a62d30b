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


def first(data: TokenData, count: int) -> list[Batch]:
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
    (batch,) = first(ready(train=[[1, 2, 3], [4, 5]], shuffle=False), 1)

    assert batch.tokens.tolist() == [[1, 2], [4, 5]]
    assert batch.targets.tolist() == [[2, 3], [5, -100]]
    assert batch.document_ids.eq(0).all()


def test_a_separator_ends_documents_inside_of_an_item() -> None:
    (batch,) = first(ready(train=[[1, 0, 2, 3]], batch_size=1, end_of_document=0), 1)

    assert batch.document_ids.tolist() == [[0, 0, 1]]


def test_each_pass_has_every_item_once_in_an_order_of_the_seed() -> None:
    passes = first_tokens(first(ready(), 23))
    assert len(passes) == 46

    assert Counter(passes[:23]) == Counter(range(23)) == Counter(passes[23:46])
    assert passes[:23] != passes[23:46]
    assert passes[:23] != list(range(23))
    assert first_tokens(first(ready(seed=1), 23)) != passes
    assert first_tokens(first(ready(shuffle=False), 12))[:23] == list(range(23))


@pytest.mark.parametrize("dataset", [Numbered, Iterated])
@pytest.mark.parametrize("settings", [{"ranks": 2}, {"ranks": 3}])
def test_devices_share_the_order_of_one_device(dataset: type, settings: dict[str, int]) -> None:
    """A global batch of all devices has the rows of one device with the larger batch."""
    ranks = settings["ranks"]
    whole = first_tokens(first(ready(train=dataset(), batch_size=2 * ranks), 20))

    by_rank = [first(ready(rank, ranks, train=dataset()), 20) for rank in range(ranks)]
    together = []
    for batches in zip(*by_rank, strict=True):
        together += first_tokens(list(batches))
    assert together == whole


def test_workers_do_not_change_the_batches() -> None:
    expected = rows_of(first(ready(), 9))

    assert rows_of(first(ready(num_workers=2), 9)) == expected


@pytest.mark.parametrize("dataset", [Numbered, Iterated])
@pytest.mark.parametrize("n_drawn", [3, 11, 12])
def test_a_saved_position_continues_with_the_next_batch(dataset: type, n_drawn: int) -> None:
    """Also in the next pass, and on other numbers of devices."""
    whole = rows_of(first(ready(train=dataset()), 20))
    data = ready(train=dataset())
    first(data, n_drawn)
    state = data.state_dict()

    again = ready(train=dataset())
    again.load_state_dict(state)
    assert rows_of(first(again, 20 - n_drawn)) == whole[2 * n_drawn :]

    shared = [ready(rank, 2, train=dataset(), batch_size=1) for rank in range(2)]
    for data in shared:
        data.load_state_dict(state)
    (one,), (other,) = (first(data, 1) for data in shared)
    assert rows_of([one, other]) == whole[2 * n_drawn :][:2]


def test_a_trainer_stops_and_continues_with_the_same_batches(tmp_path) -> None:
    def fit(n_steps: int, continued: bool) -> Recorder:
        model = Recorder()
        trainer = quiet_trainer(max_steps=n_steps, default_root_dir=tmp_path)
        data = TokenData(Numbered(), batch_size=2)
        checkpoint = tmp_path / "position.ckpt" if continued else None
        trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / "position.ckpt")
        return model

    whole = fit(20, continued=False).seen
    first_part = fit(14, continued=False).seen
    second_part = fit(20, continued=True).seen
    assert first_part + second_part == whole


def test_a_position_of_other_data_is_refused() -> None:
    data = ready()
    first(data, 1)
    for settings in ({"train": Numbered(22)}, {"seed": 1}, {"fingerprint": "other"}):
        other = ready(**settings)
        other.load_state_dict(data.state_dict())
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
    (batch,) = first(ready(train=[item], batch_size=1), 1)

    assert batch.tokens.tolist() == [[1, 2]]
    assert batch.targets.tolist() == [[2, 3]]


@pytest.mark.parametrize("item", [[1], [[1, 2]], [0.5, 1.0], "text", {"text": "a"}, [[1], [2, 3]]])
def test_another_item_is_refused(item: Any) -> None:
    with pytest.raises(UserError, match=r"TokenData has an item that is a .*: give two or"):
        first(ready(train=[item], batch_size=1), 1)


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
        first(ready(train=Iterated(0)), 1)
