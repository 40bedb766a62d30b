"""Checkpoints of transformers read as GPT+: the same logits, or one sentence that says why not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anlit import GPT, RoPE
from anlit.checkpoints.exported import read_settings
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.inference.text import text_of
from tests.inference.huggingface_folders import loud, write
from tests.models.tiny import fit, random_tokens, tiny

transformers = pytest.importorskip("transformers")

TOKENS = random_tokens(3, 24)
SIZE: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "initializer_range": 0.2,
}


def qwen3(folder: Path, shard: str = "1GB", **changes: Any) -> Any:
    """A random Qwen3 whose gains are not 1, saved into `folder`."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZE, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}, ""),
        ({"num_key_value_heads": 2}, "the 2 heads of keys and values are repeated to 4"),
        ({"tie_word_embeddings": True, "num_key_value_heads": 1}, "the head has a copy of it"),
    ],
    ids=["plain", "base", "grouped", "tied and grouped"],
)
@torch.no_grad()
def test_an_imported_qwen3_gives_the_same_logits(changes, said, tmp_path: Path, capsys) -> None:
    theirs = qwen3(tmp_path / "qwen3", shard="20KB", **changes)
    assert (tmp_path / "qwen3" / "model.safetensors.index.json").is_file()
    assert main(["import", str(tmp_path / "qwen3"), "--output", str(tmp_path / "gpt")]) == 0
    assert said in capsys.readouterr().out
    loaded = load_checkpoint(str(tmp_path / "gpt"), "cpu")
    assert (loaded.architecture, loaded.training_length) == ("GPT", 64)
    assert read_settings(tmp_path / "gpt")["end_of_document"] == 7
    expected = theirs(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(loaded.model(TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"positions": RoPE(1.0)}, {}, {"qk_norm": False}, {"qk_norm": False, "d_ff": 80}])
def test_what_was_exported_comes_back(settings, tmp_path: Path) -> None:
    model = loud(GPT, **{"positions": RoPE(0.5, base=700.0), **settings})
    write(model, tmp_path / "out")
    assert main(["import", str(tmp_path / "out"), "--output", str(tmp_path / "back")]) == 0
    weights = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.model.state_dict().items())
    back = load_checkpoint(str(tmp_path / "back"), "cpu")
    torch.testing.assert_close(back.model(TOKENS), model(TOKENS), rtol=0, atol=0)


def test_an_imported_model_trains_on_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    qwen3(tmp_path / "qwen3", vocab_size=300)
    tokenizer = train_bpe(["abc"], 260)
    (tmp_path / "qwen3" / "tokenizer.json").write_text(tokenizer.to_str())
    arguments = ["--output", str(tmp_path / "gpt"), "--context_length", "16"]
    assert main(["import", str(tmp_path / "qwen3"), *arguments]) == 0
    loaded = load_checkpoint(str(tmp_path / "gpt"), "cpu")
    text = text_of(loaded)
    assert text.encode("abcba") == tokenizer.encode("abcba").ids
    assert (text.end_of_document, text.token_at) == (7, "end")
    assert loaded.training_length == 16
    fit(loaded.model.requires_grad_(True), max_steps=1)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"attention_bias": True}, "a bias in attention"),
        ({"head_dim": 32}, "heads of width 32 that do not fill the model's width of 48 (4 heads)"),
        ({"use_sliding_window": True, "hidden_act": "relu"}, "the activation relu, a sliding window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary positions of type yarn"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"model_type": "gpt2"}, "holds a model of type 'gpt2': anlit import reads Qwen3"),
        ({"num_hidden_layers": 3}, "says 3 layers, but the weights are those of 2"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but the weights are those of 2"),
        ({"vocab_size": 30}, "embedding.weight is (29, 48) and should be (30, 48)"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_gpt_cannot_be_is_refused(changes, complaint, tmp_path: Path, capsys) -> None:
    qwen3(tmp_path / "qwen3")
    edit(tmp_path / "qwen3", **changes)
    assert main(["import", str(tmp_path / "qwen3"), "--output", str(tmp_path / "gpt")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "gpt").exists()


def test_damaged_folders_are_refused(tmp_path: Path, capsys) -> None:
    whole, copy = tmp_path / "qwen3", tmp_path / "copy"
    qwen3(whole, shard="20KB")
    part = sorted(path.name for path in whole.glob("model-*.safetensors"))[1]

    def complaint() -> str:
        assert main(["import", str(copy), "--output", str(tmp_path / "gpt")]) == 2
        found = capsys.readouterr().err
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        return found

    assert "config.json cannot be read" in complaint()
    (copy / part).unlink()
    assert f"has no {part}" in complaint()
    (copy / part).write_bytes((copy / part).read_bytes()[:-50])
    assert f"{part} cannot be read" in complaint()
    (copy / "config.json").write_text("{")
    assert "config.json cannot be read" in complaint()
    (copy / "model.safetensors.index.json").unlink()
    assert "has no model.safetensors: anlit import reads safetensors" in complaint()
    assert main(["import", str(whole), "--output", str(whole)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def test_gpt_of_another_kind_is_not_read_as_if_it_were_one(tmp_path: Path, capsys) -> None:
    write(tiny(GPT), tmp_path / "out")
    edit(tmp_path / "out", first_k_dense_replace=1)
    assert main(["import", str(tmp_path / "out"), "--output", str(tmp_path / "gpt")]) == 2
    assert "layers of experts" in capsys.readouterr().err
