"""Batches that other DataModules deliver, and the `Batch` that is made of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import (
    BatchEncoding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from anlit import GPT
from anlit.data.attributes import bytes_per_token_of, fingerprint_of, tokenizer_content_of
from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.batch_forms import as_batch
from anlit.data.tokenizer import parse_tokenizer, train_bpe
from anlit.errors import UserError

TOKENS = torch.tensor([[5, 6, 7, 8], [9, 5, 5, 6]])
TARGETS = torch.tensor([[6, 7, 8, 1], [5, -100, 6, -100]])
LABELS = torch.tensor([[5, 6, 7, 8], [9, 5, -100, -100]])


def converted(value: Any) -> Batch:
    return as_batch(value, "Mine", vocab_size=10)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint16])
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_pair_is_a_batch_of_one_document_per_row(kind: type, dtype: torch.dtype) -> None:
    batch = converted(kind([TOKENS.to(dtype), TARGETS]))

    assert batch.tokens.equal(TOKENS)
    assert batch.tokens.dtype == torch.int64
    assert batch.targets.equal(TARGETS)
    assert batch.document_ids.eq(0).all()
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.longest == 4


def test_an_anlit_batch_keeps_its_documents() -> None:
    batch = batch_from_blocks([[1, 0, 2, 3, 4]], end_of_document=0)

    assert converted(batch) is batch


def test_a_dictionary_has_the_loss_that_transformers_gives() -> None:
    """The same weights in both: the mean over next labels, −100 left out."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    llama = LlamaForCausalLM(config).double()
    mask = (LABELS >= 0).long()
    expected = llama(input_ids=TOKENS, labels=LABELS, attention_mask=mask).loss
    values = BatchEncoding({"input_ids": TOKENS, "labels": LABELS, "attention_mask": mask})

    batch = converted(values)

    logits = llama(input_ids=batch.tokens, attention_mask=mask).logits  # (B, T, V)
    loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert batch.tokens.shape == TOKENS.shape
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # theirs is in float32


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (TOKENS, "a Tensor as a batch: give (tokens, targets)"),
        ((TOKENS,), "a tuple of 1 as a batch: give (tokens, targets)"),
        (None, "a NoneType as a batch"),
        ((TOKENS.float(), TARGETS), "tokens in float32: give integers"),
        ((TOKENS, TARGETS.double()), "targets in float64: give integers"),
        ((TOKENS, TARGETS > 0), "targets in bool"),
        ((TOKENS[0], TARGETS[0]), "tokens of shape (4,): give (sequences, tokens)"),
        ((TOKENS[:0], TARGETS[:0]), "tokens of shape (0, 4): give (sequences, tokens)"),
        ((TOKENS, TARGETS[:, 1:]), "targets of shape (2, 3) with tokens of shape (2, 4)"),
        ((TOKENS.tolist(), TARGETS), "a list of 2 as tokens: give a tensor"),
        ((TOKENS + 1, TARGETS), "the token 10, and the model's vocabulary has 10 tokens"),
        ((TOKENS - 6, TARGETS), "the token -1, and"),
        ((TOKENS, TARGETS + 3), "the target -97, and"),
        ({"input_ids": TOKENS}, "a dictionary without labels"),
        ({"tokens": TOKENS}, "a dictionary without input_ids and labels"),
        (
            {"input_ids": TOKENS, "labels": LABELS, "position_ids": TOKENS},
            "a dictionary with position_ids",
        ),
        (
            {"input_ids": TOKENS, "labels": LABELS, "attention_mask": LABELS.flip(1).ge(0)},
            "an attention_mask that hides tokens in front of others",
        ),
    ],
)
def test_any_other_batch_is_refused_by_name(value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        converted(value)

    assert f"Mine delivers {sentence}" in str(error.value)


def test_rows_of_one_document_are_attended_to_like_a_batch_of_documents() -> None:
    """A model in a Trainer leaves out the masks; the loss is the same."""
    model = GPT(vocab_size=10, context_length=4, n_layers=2, n_heads=2, d_model=8)
    batch = converted((TOKENS, TARGETS))
    with_masks, _ = model.loss_of(batch)
    model._trainer = SimpleNamespace(datamodule=object())  # type: ignore[assignment]
    without_masks, _ = model.loss_of(batch)

    assert without_masks.item() == pytest.approx(with_masks.item(), abs=1e-6)


class Mine:
    """A user's data. Only its attributes matter."""

    vocab_size = 10


def data_with_tokenizer(tokenizer: Any) -> Mine:
    data = Mine()
    data.tokenizer = tokenizer
    return data


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(["some words in some text"] * 3, 270)


@pytest.fixture
def fast_tokenizer(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer `bpe` of transformers."""
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>")


def test_the_tokenizer_of_the_data_may_have_three_forms(
    bpe: Tokenizer, fast_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_str())
    expected = bpe.encode("some words").ids

    for tokenizer in (bpe, fast_tokenizer, str(tmp_path), str(path)):
        content = tokenizer_content_of(data_with_tokenizer(tokenizer))
        assert parse_tokenizer(content, "").encode("some words").ids == expected


def test_a_call_of_the_tokenizer_leaves_the_fingerprint_as_it_was(
    fast_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Padding and truncation stay set in a tokenizer of transformers."""
    data = data_with_tokenizer(fast_tokenizer)
    fingerprint = fingerprint_of(data)

    fast_tokenizer(["some", "some words"], padding=True, truncation=True, max_length=2)

    assert fingerprint_of(data) == fingerprint


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("vocab_size", 10.0, "give a whole number from 1"),
        ("vocab_size", 0, "give a whole number from 1"),
        ("fingerprint", 5, "give a text that names the data"),
        ("tokenizer", 5, "give a tokenizer of the tokenizers library"),
        ("tokenizer", "beyond.json", "give the path of a tokenizer.json"),
        ("bytes_per_token", -1.0, "more than 0"),
        ("bytes_per_token", "4", "more than 0"),
        ("bytes_per_token", lambda split: float("nan"), "more than 0"),
    ],
)
def test_an_attribute_of_another_type_is_refused(name: str, value: Any, fix: str) -> None:
    data = Mine()
    setattr(data, name, value)

    def read_all() -> None:
        fingerprint_of(data)
        bytes_per_token_of(data, "val")

    with pytest.raises(UserError, match=rf"^Mine\.{name} .*: .*{fix}"):
        read_all()


def test_bytes_per_token_is_a_number_a_method_or_missing() -> None:
    data = Mine()
    assert bytes_per_token_of(data, "val") is None
    data.bytes_per_token = 3
    assert bytes_per_token_of(data, "val") == 3.0
    data.bytes_per_token = {"val": 4.5, "test": None}.get
    assert bytes_per_token_of(data, "val") == 4.5
    assert bytes_per_token_of(data, "test") is None
