"""Reading prepared shards: the stream, what the module tells about them, and every refusal."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from anlit.data import TokenShards
from anlit.data.batch import IGNORED
from anlit.data.loader import open_split
from anlit.data.shards import blocks_in, chunks_of
from anlit.errors import UserError


def ready(path: str, **changes) -> TokenShards:
    data = TokenShards(path, **{"context_length": 64, "batch_size": 4, **changes})
    data.setup()
    return data


def with_model(path: str, **changes) -> TokenShards:
    """Shards attached to a trainer of a model with these attributes."""
    data = TokenShards(path, batch_size=4)
    model = SimpleNamespace(**{"context_length": 64, "vocab_size": 320, **changes})
    data.trainer = SimpleNamespace(lightning_module=model, world_size=1, current_epoch=0)
    return data


@pytest.fixture
def own_shards(tiny_shards: str, tmp_path: Path) -> Path:
    """A copy of the small corpus's shards, to be damaged."""
    shutil.copytree(tiny_shards, tmp_path / "shards")
    return tmp_path / "shards"


def test_training_blocks_are_consecutive_and_do_not_overlap(tiny_shards: str) -> None:
    stream = np.concatenate(
        [np.asarray(block) for block in open_split(tiny_shards, "train", 1, shuffle=False, seed=0, drop_last=False)]
    )
    blocks = stream[: len(stream) // 65 * 65].reshape(-1, 65).tolist()
    assert len(blocks) == blocks_in(tiny_shards, "train", 65)
    seen = []
    for batch in ready(tiny_shards).train_dataloader():
        assert batch.tokens.shape == batch.targets.shape == batch.document_ids.shape == (4, 64)
        seen += torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()
    assert seen != blocks[: len(seen)]
    assert sorted(seen) == sorted(block for block in blocks if block in seen)
    assert len(seen) == len(blocks) // 4 * 4


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_has_every_block_in_a_fixed_order(tiny_shards: str, workers: int) -> None:
    data = ready(tiny_shards, num_workers=workers)
    first, second = (torch.cat([b.tokens for b in loader()]) for loader in (data.val_dataloader, data.test_dataloader))
    assert torch.equal(first, second)
    assert len(first) == blocks_in(tiny_shards, "val", 65)


def test_seed_and_shuffle_decide_the_order(tiny_shards: str) -> None:
    def first(**changes) -> list[int]:
        return next(iter(ready(tiny_shards, **changes).train_dataloader())).tokens.flatten().tolist()

    assert first(seed=1) == first(seed=1) != first(seed=2)
    assert first(shuffle=False, seed=1) == first(shuffle=False, seed=2)


def test_documents_and_uncounted_targets_come_from_the_tokens(tiny_shards: str) -> None:
    for batch in ready(tiny_shards, score_first_token=False).val_dataloader():
        assert torch.equal(batch.document_ids[:, 1:] - batch.document_ids[:, :-1], (batch.tokens[:, :-1] == 0).long())
        assert torch.equal(batch.targets == IGNORED, batch.tokens == 0)


def test_what_the_module_tells(tiny_shards: str) -> None:
    data = ready(tiny_shards)
    assert data.vocab_size == data.tokenizer.get_vocab_size() == 320
    assert data.bytes_per_token("train") == data.manifest["train"]["bytes"] / data.manifest["train"]["tokens"]
    assert {"corpus", "content_sha256", "tokenizer_sha256", "tokens", "bytes"} <= data.fingerprint.keys()
    assert data.tokenizer.encode("<|endoftext|>").ids != [data.manifest["end_of_document"]]


def test_context_length_and_vocabulary_of_the_model(tiny_shards: str) -> None:
    data = with_model(tiny_shards)
    data.setup()
    assert data.context_length == 64
    with_model(tiny_shards, vocab_size=384).setup()  # 320 rounded up to a multiple of 128
    for size in (319, 385, 50304):
        with pytest.raises(UserError, match=rf"vocabulary of {size} tokens .* have 320: set --model.vocab_size 320"):
            with_model(tiny_shards, vocab_size=size).setup()
    with pytest.raises(UserError, match=r"set --data\.context_length"):
        TokenShards(tiny_shards).setup()


def test_missing_and_foreign_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere with token shards: set --data.path"):
        ready(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"not a prepared folder, it has no manifest\.json"):
        ready(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\x00"])
def test_damaged_manifest(own_shards: Path, text: str) -> None:
    (own_shards / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        ready(str(own_shards))


def test_shards_of_another_format(own_shards: Path) -> None:
    manifest = json.loads((own_shards / "manifest.json").read_text())
    (own_shards / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(UserError, match="shards of format 99"):
        ready(str(own_shards))


def test_missing_and_truncated_chunks(own_shards: Path) -> None:
    chunk = own_shards / "train" / chunks_of(str(own_shards), "train")[0]["filename"]
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-2])
    with pytest.raises(UserError, match=rf"{chunk.name} is damaged \(it has {len(content) - 2:,} bytes"):
        ready(str(own_shards))
    chunk.unlink()
    with pytest.raises(UserError, match=rf"{chunk.name} is damaged \(it is missing\)"):
        ready(str(own_shards))
    (own_shards / "train" / "index.json").unlink()
    with pytest.raises(UserError, match=r"index\.json is damaged \(it is missing\)"):
        ready(str(own_shards))


def test_context_longer_than_the_shards(tiny_shards: str) -> None:
    longest = chunks_of(tiny_shards, "val")[0]["dim"]
    with pytest.raises(UserError, match=rf"longer than the chunks of .*val.* --model.context_length to {longest - 1} "):
        ready(tiny_shards, context_length=longest, batch_size=1)
    ready(tiny_shards, context_length=longest - 1, batch_size=1)


def test_more_sequences_wanted_than_there_are(tiny_shards: str) -> None:
    blocks = blocks_in(tiny_shards, "train", 65)
    ready(tiny_shards, batch_size=blocks)
    with pytest.raises(UserError, match=rf"batch_size {blocks + 1} .*and .*train has {blocks} "):
        ready(tiny_shards, batch_size=blocks + 1)
    with pytest.raises(UserError, match=rf"with 2 worker\(s\) .*needs {2 * blocks:,} sequences"):
        ready(tiny_shards, batch_size=blocks, num_workers=2)
