"""Reading prepared shards: the stream, what the module tells about them, and every refusal."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from anlit import GPT
from anlit.data.batch import IGNORED, Batch
from anlit.data.module import TokenShards
from anlit.data.shards import chunks_of
from anlit.errors import UserError
from tests.data.devices import on_two_devices
from tests.data.prepared import write_prepared

LENGTH = 64


def ready(path: str, **changes: Any) -> TokenShards:
    data = TokenShards(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    data.setup()
    return data


def with_trainer(path: str, rank: int = 0, ranks: int = 1, model: Any = None, **changes: Any) -> TokenShards:
    """Shards attached to a trainer of one of several devices."""
    data = TokenShards(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    data.trainer = SimpleNamespace(
        lightning_module=model,
        distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks},
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup()
    return data


def with_model(path: str, **changes: Any) -> TokenShards:
    model = SimpleNamespace(**{"context_length": LENGTH, "vocab_size": 320, **changes})
    return with_trainer(path, model=model, context_length=None)


def blocks_of(batches: list[Batch]) -> list[list[int]]:
    """Each row's T + 1 tokens."""
    return [row for batch in batches for row in torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()]


def all_blocks(tokens: np.ndarray, length: int = LENGTH) -> list[list[int]]:
    n_blocks = (len(tokens) - 1) // length
    return [tokens[block * length : block * length + length + 1].tolist() for block in range(n_blocks)]


@pytest.fixture
def own_shards(prepared: str, tmp_path: Path) -> Path:
    """A copy of the prepared folder, to be damaged."""
    shutil.copytree(prepared, tmp_path / "shards")
    return tmp_path / "shards"


def test_training_gives_every_block_once_before_any_again(prepared: str, streams: dict[str, np.ndarray]) -> None:
    blocks = all_blocks(streams["train"])
    loader = ready(prepared).train_dataloader()
    assert len(loader) == len(blocks) // 4 == 179
    batches = [*loader, *loader, *loader]
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape == batch.document_ids.shape == (4, LENGTH)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    seen = blocks_of(batches)
    assert len(seen) == 3 * 179 * 4
    for first in (0, len(blocks)):
        one_pass = seen[first : first + len(blocks)]
        assert one_pass != blocks
        assert sorted(one_pass) == sorted(blocks)
    assert seen[: len(blocks)] != seen[len(blocks) : 2 * len(blocks)]


def test_without_shuffling_the_tokens_come_as_they_lie(prepared: str, streams: dict[str, np.ndarray]) -> None:
    loader = ready(prepared, shuffle=False).train_dataloader()
    targets = torch.cat([batch.targets.flatten() for batch in loader]).tolist()
    assert targets == streams["train"][1 : 1 + 179 * 4 * LENGTH].tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_does_not_matter(prepared: str, workers: int, shuffle: bool) -> None:
    one, other = (ready(prepared, num_workers=n, shuffle=shuffle).train_dataloader() for n in (0, workers))
    ours, theirs = [*one, *one], [*other, *other]
    assert blocks_of(ours) == blocks_of(theirs)
    assert all(torch.equal(a.cu_seqlens, b.cu_seqlens) for a, b in zip(ours, theirs, strict=True))
    other.close()


def test_devices_share_the_stream(prepared: str) -> None:
    alone = blocks_of(list(ready(prepared, batch_size=6).train_dataloader()))
    loaders = [with_trainer(prepared, rank, 3, batch_size=2).train_dataloader() for rank in range(3)]
    assert {len(loader) for loader in loaders} == {len(alone) // 6}
    together = [row for batches in zip(*loaders, strict=True) for row in blocks_of(list(batches))]
    assert together == alone


def test_reading_draws_no_random_numbers_of_the_model(prepared: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    data = ready(prepared, num_workers=1)
    next(iter(data.train_dataloader()))
    list(data.val_dataloader())
    data.teardown("fit")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_counts_every_token_but_the_first_once(
    prepared: str, streams: dict[str, np.ndarray], ranks: int
) -> None:
    loaders = [with_trainer(prepared, rank, ranks).val_dataloader() for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loader) for loader in loaders} == {-(-79 // (4 * ranks))}
    rows = [row for step in zip(*batches, strict=True) for batch in step for row in batch.targets]
    targets = torch.cat(rows)
    assert targets[targets != IGNORED].tolist() == streams["val"][1:].tolist()
    tokens = torch.cat([row for step in zip(*batches, strict=True) for batch in step for row in batch.tokens])
    assert tokens[:4999].tolist() == streams["val"][:4999].tolist()
    assert not tokens[5000:].any()  # filled up with the end of document, 0


def test_a_device_without_a_row_left_gets_one_that_is_ignored(prepared: str) -> None:
    last = [list(with_trainer(prepared, rank, 3, val_batch_size=40).val_dataloader())[-1] for rank in range(3)]
    assert [len(batch.targets) for batch in last] == [40, 39, 1]
    assert (last[2].targets == IGNORED).all()


def validate(path: str, val_batch_size: int, **trainer: Any) -> dict[str, float]:
    torch.manual_seed(0)
    model = GPT(vocab_size=320, context_length=LENGTH, n_layers=1, n_heads=1, d_model=8)
    validating = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, **trainer
    )
    return dict(validating.validate(model, TokenShards(path, val_batch_size=val_batch_size), verbose=False)[0])


@pytest.mark.parametrize("batch_size", [8, 79])
def test_validation_loss_on_two_devices_is_that_on_one(prepared: str, batch_size: int) -> None:
    """With batches of 79 the second device has nothing to evaluate."""
    alone = validate(prepared, 8)
    strategy = DDPStrategy(process_group_backend="gloo")
    both = on_two_devices(validate, path=prepared, val_batch_size=batch_size, devices=2, strategy=strategy)
    for loss in both:
        assert loss["val/loss"] == pytest.approx(alone["val/loss"], rel=1e-6)


@pytest.mark.parametrize("n", [1, 64, 100, 640, 4999])
def test_validation_on_the_first_tokens(prepared: str, streams: dict[str, np.ndarray], n: int) -> None:
    batches = list(ready(prepared, val_tokens=n).val_dataloader())
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert targets[targets != IGNORED].tolist() == streams["val"][1 : n + 1].tolist()
    assert sum(len(batch.tokens) for batch in batches) == -(-n // LENGTH)


def test_fewer_validation_tokens_than_asked_for(prepared: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "anlit")
    batches = list(ready(prepared, val_tokens=10_000).val_dataloader())
    assert sum(int((batch.targets != IGNORED).sum()) for batch in batches) == 4999
    assert "has only 4,999 targets, not the 10,000 of --data.val_tokens" in caplog.text


def test_a_test_split_where_there_is_one(tmp_path: Path, prepared: str, streams: dict[str, np.ndarray]) -> None:
    own = write_prepared(tmp_path / "own", {**streams, "test": streams["val"][:700]})
    data = ready(str(tmp_path / "own"), val_tokens=64)
    for loader, expected in ((data.test_dataloader(), own["test"]), (data.predict_dataloader(), own["val"][:65])):
        targets = torch.cat([batch.targets.flatten() for batch in loader])
        assert targets[targets != IGNORED].tolist() == expected[1:].tolist()
    without = torch.cat([batch.targets.flatten() for batch in ready(prepared).test_dataloader()])
    assert without[:4999].tolist() == streams["val"][1:].tolist()
    data.manifest["test"]["bytes"] = 5 * 700
    assert (data.bytes_per_token("test"), data.bytes_per_token("val")) == (5, 3)
    assert ready(prepared).bytes_per_token("test") == 3


def test_documents_and_uncounted_targets_come_from_the_tokens(prepared: str) -> None:
    for batch in ready(prepared, score_first_token=False).val_dataloader():
        assert torch.equal(batch.document_ids[:, 1:] - batch.document_ids[:, :-1], (batch.tokens[:, :-1] == 0).long())
        counted = batch.targets != IGNORED
        assert not (counted & (batch.tokens == 0)).any()


def test_what_the_module_tells(prepared: str, tiny_shards: str) -> None:
    data = ready(prepared)
    assert data.vocab_size == 320
    assert data.bytes_per_token("train") == 3
    assert {
        "corpus",
        "content_sha256",
        "tokenizer_sha256",
        "tokens",
        "bytes",
        "train",
        "val",
    } <= data.fingerprint.keys()
    with pytest.raises(UserError, match=r"has no tokenizer.json, .*: put the tokenizer's file there"):
        _ = data.tokenizer
    with_one = TokenShards(tiny_shards)
    assert with_one.tokenizer.get_vocab_size() == 320
    assert with_one.tokenizer.encode("<|endoftext|>").ids != [with_one.manifest["end_of_document"]]


def test_unknown_bytes_log_no_bits_per_byte(tmp_path: Path, streams: dict[str, np.ndarray]) -> None:
    write_prepared(tmp_path / "own", streams)
    logged = []
    for data_bytes in (15_000, None):
        data = ready(str(tmp_path / "own"))
        data.manifest["val"]["bytes"] = data_bytes
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
        model = GPT(vocab_size=320, context_length=LENGTH, n_layers=1, n_heads=1, d_model=8)
        logged.append(trainer.validate(model, data, verbose=False)[0])
    assert logged[0].keys() - logged[1].keys() == {"val/bits_per_byte"}
    assert logged[0]["val/bits_per_byte"] == pytest.approx(logged[0]["val/loss"] / np.log(2) / 3)


def test_validation_at_a_longer_context_than_training(prepared: str) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    model = GPT(vocab_size=320, context_length=16, n_layers=1, n_heads=1, d_model=8)
    data = TokenShards(prepared, val_context_length=256)
    losses = [trainer.validate(model, data, verbose=False)[0]["val/loss"]]
    assert next(iter(data.val_dataloader())).tokens.shape == (8, 256)
    assert data.context_length == 16
    data.setup()
    assert next(iter(data.train_dataloader())).tokens.shape == (8, 16)
    losses.append(trainer.validate(model, TokenShards(prepared), verbose=False)[0]["val/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    predicted = trainer.predict(model, TokenShards(prepared, val_context_length=256))
    assert sum(int((part["targets"] != IGNORED).sum()) for part in predicted) == 4999


class Lengths(L.LightningModule):
    """Records the shapes and targets that it is trained and validated on."""

    context_length = LENGTH

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.validated: set[int] = set()
        self.targets: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.global_step, tuple(batch.tokens.shape)))
        self.targets.append(batch.targets.flatten())
        return self.weight.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.add(batch.tokens.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_lengths(data: TokenShards, checkpoint: str | None = None, **trainer: Any) -> tuple[Lengths, L.Trainer]:
    model = Lengths()
    fitting = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, **{"max_steps": 6, "val_check_interval": 3, **trainer},
    )  # fmt: skip
    fitting.fit(model, data, ckpt_path=checkpoint)
    return model, fitting


def test_context_schedule_cuts_the_same_tokens_by_optimizer_steps(prepared: str, tmp_path: Path) -> None:
    schedule = {0: 16, 2: 32, 5: LENGTH}
    expected = [(0, (16, 16)), (1, (16, 16)), (2, (8, 32)), (3, (8, 32)), (4, (8, 32)), (5, (4, 64))]
    model, _ = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule))
    plain, _ = fit_lengths(TokenShards(prepared, 4))
    assert model.seen == expected
    assert model.validated == {LENGTH}
    assert torch.equal(torch.cat(model.targets), torch.cat(plain.targets))
    accumulated, _ = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule), accumulate_grad_batches=2)
    assert accumulated.seen == [step for step in expected for _ in range(2)]
    first, trainer = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule), max_steps=3)
    trainer.save_checkpoint(tmp_path / "3.ckpt")
    second, _ = fit_lengths(TokenShards(prepared, 4, context_schedule=schedule), str(tmp_path / "3.ckpt"))
    assert first.seen + second.seen == expected


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        ({5: 64}, "does not begin at step 0"),
        ({}, "does not begin at step 0"),
        ({-1: 32, 0: 64}, "does not begin at step 0"),
        ({0: 48, 5: 64}, "has length 48 at step 0, which does not divide the context length 64"),
        ({0: 0, 5: 64}, "has length 0 at step 0"),
        ({0: 64, 5: 32}, "ends with 32 and the context length is 64: end it with 64"),
    ],
)
def test_context_schedules_that_do_not_fit(prepared: str, schedule: dict[int, int], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        ready(prepared, context_schedule=schedule)


def test_context_length_and_vocabulary_of_the_model(prepared: str) -> None:
    assert with_model(prepared).context_length == LENGTH
    with_model(prepared, vocab_size=384)  # 320 rounded up to a multiple of 128
    for size in (319, 385, 50304):
        with pytest.raises(UserError, match=rf"vocabulary of {size} tokens .* have 320: set --model.vocab_size 320"):
            with_model(prepared, vocab_size=size)
    with pytest.raises(UserError, match=r"set --data\.context_length"):
        TokenShards(prepared).setup()


def test_missing_foreign_and_unfinished_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere with token shards: set --data.path"):
        ready(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"not a prepared folder, it has no manifest\.json"):
        ready(str(tmp_path))
    (tmp_path / ".work").mkdir()
    with pytest.raises(UserError, match=r"preparation of .* is not finished: repeat the command"):
        ready(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\x00", "\xff"])
def test_damaged_manifest(own_shards: Path, text: str) -> None:
    (own_shards / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        ready(str(own_shards))


@pytest.mark.parametrize("version", [1, 99])
def test_shards_of_another_format(own_shards: Path, version: int) -> None:
    (own_shards / "manifest.json").write_text(json.dumps({"format_version": version}))
    with pytest.raises(UserError, match=f"shards of format {version} .* reads 2: remove the folder and prepare it"):
        ready(str(own_shards))


def test_missing_and_truncated_chunks(own_shards: Path) -> None:
    chunk = own_shards / "train" / chunks_of(str(own_shards), "train")[0]["filename"]
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-2])
    with pytest.raises(
        UserError, match=rf"{chunk.name} is damaged \(it has {len(content) - 2:,} bytes .*anlit prepare"
    ):
        ready(str(own_shards))
    chunk.unlink()
    with pytest.raises(UserError, match=rf"{chunk.name} is damaged \(it is missing\)"):
        ready(str(own_shards))
    (own_shards / "train" / "index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json is damaged \(it is missing\)"):
        ready(str(own_shards))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"chunks": [{}]}', '{"chunks": []}'])
def test_damaged_index(own_shards: Path, text: str) -> None:
    (own_shards / "train" / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"train(/index\.json)? is damaged \("):
        ready(str(own_shards))


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_found_while_training_is_one_sentence(own_shards: Path, workers: int) -> None:
    chunk = own_shards / "train" / "chunk-0-2.bin"
    content = bytearray(chunk.read_bytes())
    content[1000] ^= 64
    chunk.write_bytes(content)
    loader = ready(str(own_shards), num_workers=workers).train_dataloader()
    with pytest.raises(UserError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{chunk} is damaged (its CRC-32 is")
    assert "`anlit prepare Test --path data/test`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_context_longer_than_the_shards(prepared: str) -> None:
    with pytest.raises(
        UserError, match=r"context_length 46000 is too long .*train, .*--model.context_length to 45999 "
    ):
        ready(prepared, context_length=46_000, batch_size=1)
    ready(prepared, context_length=45_999, batch_size=1)


def test_more_sequences_wanted_than_there_are(prepared: str) -> None:
    ready(prepared, batch_size=718)
    with pytest.raises(UserError, match=r"batch_size 719 on each of 1 .*needs 719 sequences and .*train has 718 "):
        ready(prepared, batch_size=719)
    with pytest.raises(UserError, match=r"on each of 2 device\(s\) needs 720 sequences"):
        with_trainer(prepared, 0, 2, batch_size=360)


def test_nothing_to_validate_on(tmp_path: Path, streams: dict[str, np.ndarray]) -> None:
    write_prepared(tmp_path / "own", {**streams, "val": streams["val"][:1]})
    with pytest.raises(UserError, match="val has no token to predict"):
        ready(str(tmp_path / "own"))


def test_a_negative_seed(prepared: str) -> None:
    with pytest.raises(UserError, match=r"--data.seed is -1: set it to 0 or a positive number"):
        ready(prepared, seed=-1)
