"""The byte-level BPE: exact round trips, determinism, no hidden special tokens."""

from pathlib import Path

import numpy as np
import pytest

from anlit.data.tokenizer import encode_documents, end_of_document_id, load_tokenizer, token_dtype, train_bpe
from anlit.errors import UserError

TEXTS = ["the row norm of the row is one\n" * 5, "größe und länge, naïve", "def f(x):\n    return x\n" * 9]


def test_any_text_decodes_to_itself() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    strange = ["", " leading", "\r\n\t\x00\x7f", "日本語 🙂 \ufeffé", "<|endoftext|>", "a<|endoftext|>b", "\u2028"]
    for text, ids in zip(strange, encode_documents(tokenizer, strange, end_of_document=0), strict=True):
        assert ids[-1] == 0
        assert 0 not in ids[:-1]
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_special_token_stays_text_after_loading(tmp_path: Path) -> None:
    train_bpe(TEXTS, 300).save(str(tmp_path / "tokenizer.json"))
    assert 0 not in load_tokenizer(tmp_path / "tokenizer.json").encode("<|endoftext|>").ids


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert train_bpe(TEXTS, 300).to_str() == train_bpe(TEXTS, 300).to_str()


def test_vocabulary_counts_the_special_token() -> None:
    tokenizer = train_bpe(TEXTS, 290)
    assert tokenizer.get_vocab_size() == 290
    assert end_of_document_id(tokenizer) == 0


def test_ids_take_two_bytes_up_to_65536() -> None:
    assert token_dtype(1 << 16) is np.uint16
    assert token_dtype((1 << 16) + 1) is np.int32


def test_errors_name_the_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size 256"):
        train_bpe(TEXTS, 256)
    with pytest.raises(UserError, match=r"no tokenizer at .*none\.json"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(UserError, match='no token "</s>"'):
        end_of_document_id(train_bpe(TEXTS, 290), "</s>")
