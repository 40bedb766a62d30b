"""DataModules as users write them, and datasets for `TokenData`."""

from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from anlit.errors import UserError

N_ROWS = 41
LENGTH = 16
ROWS = torch.randint(0, 50, (N_ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))


class Rows(Dataset):
    """Items of `LENGTH` + 1 tokens."""

    def __init__(self, n: int = N_ROWS) -> None:
        self.rows = ROWS[:n]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Pairs(L.LightningDataModule):
    """(tokens, targets), with a smaller last batch, without anything that anlit asks for."""

    def __init__(self, first: int = 0, batch_size: int = 4) -> None:
        super().__init__()
        self.first = first
        self.batch_size = batch_size

    def loader(self) -> Any:
        pairs = TensorDataset(ROWS[self.first :, :-1], ROWS[self.first :, 1:])
        return DataLoader(pairs, self.batch_size)

    train_dataloader = loader
    val_dataloader = loader


class Collated(Pairs):
    """Workers whose function belongs to the module, which refers to its Trainer."""

    def __init__(self, num_workers: int = 2, start_method: str | None = None) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.start_method = start_method

    def collate(self, rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.stack(rows)
        return tokens[:, :-1], tokens[:, 1:]

    def train_dataloader(self) -> Any:
        return DataLoader(
            Rows(),
            self.batch_size,
            shuffle=True,
            num_workers=self.num_workers,
            collate_fn=self.collate,
            multiprocessing_context=self.start_method,
        )


class Mistaken(Rows):
    """The seventh item raises an error of this kind."""

    def __init__(self, kind: str = "KeyError") -> None:
        super().__init__()
        self.kind = kind

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7 and self.kind == "KeyError":
            return {}["text"]
        if index == 7 and self.kind == "library":
            return torch.stack([self.rows[0], self.rows[1][:3]])
        if index == 7 and self.kind == "UserError":
            raise UserError("row 7 is empty: remove it")
        return super().__getitem__(index)


class FailsInWorker(Collated):
    """Its dataset fails in a worker process, or in the run without workers."""

    def __init__(self, kind: str = "KeyError", num_workers: int = 2) -> None:
        super().__init__(num_workers)
        self.kind = kind

    def train_dataloader(self) -> Any:
        return DataLoader(
            Mistaken(self.kind), 4, num_workers=self.num_workers, collate_fn=self.collate
        )


class LateMistake(Pairs):
    """The third batch has a token beyond a vocabulary of 50."""

    def train_dataloader(self) -> Any:
        rows = ROWS.clone()
        rows[2 * self.batch_size] = 50
        return DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), self.batch_size)


class TrainingAlone(L.LightningDataModule):
    """Dictionaries of Hugging Face, without validation and without a setting batch_size."""

    vocab_size = 50

    def train_dataloader(self) -> Any:
        items = [{"input_ids": row[1:], "labels": row[1:]} for row in ROWS]
        return DataLoader(items, 4)


class Numbers(Pairs):
    fingerprint = "numbers, version 1"


class Words(Numbers):
    """A tokenizer and a fingerprint: each number is a word."""

    @property
    def tokenizer(self) -> Tokenizer:
        words = {str(number): number for number in range(50)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer


class Floats(Pairs):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(ROWS.float(), ROWS.float()), 4)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from zip(ROWS[:, :-1], ROWS[:, 1:], strict=True)


class WithoutLength(Pairs):
    """A state, and a loader without a length. Lightning reads a batch ahead of it."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 4)

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}


class NoData: ...
