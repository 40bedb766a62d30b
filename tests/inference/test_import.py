"""Checkpoints of transformers read as GPT+: the same logits, or one sentence that says why not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.inference.generation import Ending
from anlit.inference.huggingface.families import FAMILIES
from anlit.inference.text import text_of
from tests.evaluation.saved import save
from tests.inference.huggingface_folders import read, write
from tests.inference.published import CASES, published
from tests.models.tiny import fit, random_tokens

transformers = pytest.importorskip("transformers")

TOKENS = random_tokens(3, 24)


def import_model(source: Path, output: Path, *more: str) -> Path:
    assert main(["import", str(source), "--output", str(output), *more]) == 0
    return output


def export_model(source: Path, output: Path) -> Path:
    assert main(["export", str(source), "--format", "huggingface", "--output", str(output)]) == 0
    return output


def edit(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_family_comes_in_and_goes_back(case, tmp_path: Path) -> None:
    """The same logits as transformers', and out again in the same class with the same weights."""
    theirs = published(case, tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    loaded = load_checkpoint(str(import_model(tmp_path / "theirs", tmp_path / "ours")), "cpu")
    assert (loaded.architecture, loaded.training_length) == ("GPT", 64)
    assert loaded.model.model.n_parameters() == sum(parameter.numel() for parameter in theirs.parameters())
    expected = theirs(TOKENS).logits
    assert expected.std() > 0.5, "logits near zero would agree whatever the network"
    torch.testing.assert_close(loaded.model(TOKENS), expected, rtol=1e-5, atol=1e-5)

    back = read(export_model(tmp_path / "ours", tmp_path / "back"), trust=False)
    assert type(back) is type(theirs)
    torch.testing.assert_close(back.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert torch.equal(back(TOKENS).logits, expected)


def test_every_family_has_a_case() -> None:
    assert {record["model_type"] for record in CASES.values()} == FAMILIES.keys()


@pytest.mark.usefixtures("own_code_cache")
@pytest.mark.parametrize("case", ["Llama-3.2-1B", "Qwen3-0.6B, YaRN", "Mistral-Nemo"])
@torch.no_grad()
def test_with_its_attention_changed_it_goes_out_in_code_of_its_own(case, tmp_path: Path) -> None:
    published(case, tmp_path / "theirs")
    ours = import_model(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_checkpoint(str(ours), "cpu", attention="anlit.ScaleInvariant")
    theirs = read(write(loaded.model, tmp_path / "out"), trust=True)
    assert type(theirs).__name__ == "GPTForCausalLM"
    torch.testing.assert_close(theirs(TOKENS).logits, loaded.model(TOKENS), rtol=1e-4, atol=5e-5)


def test_a_run_from_imported_weights_remembers_the_family(tmp_path: Path) -> None:
    """A Mistral without a window is a Llama but for its name."""
    published("Mistral-7B-v0.3", tmp_path / "theirs")
    ours = import_model(tmp_path / "theirs", tmp_path / "ours")
    model = load_checkpoint(str(ours), "cpu").model.requires_grad_(True)
    load_initial_weights(model, str(ours))
    file = save(model, tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert type(read(export_model(file, tmp_path / "back"), trust=False)).__name__ == "MistralForCausalLM"


def test_an_imported_model_keeps_its_tokenizer_and_trains_on(tmp_path: Path, capsys) -> None:
    """A Llama has never read a text without its `<s>`, so a prompt begins with it."""
    published("Llama-2-7b", tmp_path / "theirs", vocab_size=300)
    tokenizer = train_bpe(["abc"], 260)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    (tmp_path / "theirs" / "tokenizer.json").write_text(tokenizer.to_str())
    ours = import_model(tmp_path / "theirs", tmp_path / "ours", "--context_length", "16")
    capsys.readouterr()
    assert main(["generate", str(ours), "abcba", "--max_tokens=1", "--json"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    loaded = load_checkpoint(str(ours), "cpu")
    text = text_of(loaded)
    assert text.encode("abcba") == tokenizer.encode("abcba", add_special_tokens=False).ids
    assert json.loads(line)["prompt_tokens"] == [special[0][1], *text.encode("abcba")]
    assert text.ending == Ending(7, "end")
    assert loaded.training_length == 16
    fit(loaded.model.requires_grad_(True), max_steps=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "qwen3"
    published("Qwen3-0.6B", folder)
    return folder


@pytest.fixture
def qwen3(whole: Path, tmp_path: Path) -> Path:
    """A copy of a whole folder, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / "qwen3"))


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a folder is refused; nothing is written."""
    capsys.readouterr()
    assert main(["import", str(folder), "--output", str(folder.parent / "gpt")]) == 2
    assert not (folder.parent / "gpt").exists()
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    return sentence


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_act": "relu", "mlp_bias": True}, "hidden_act='relu' (the MLP of GPT+ is a SwiGLU), mlp_bias=True ("),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' (GPT+ has default, linear, llama3, yarn)"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1}}, "rope_parameters.mscale (the positions of"),
        ({"rope_scaling": {"type": "llama3"}}, "missing 1 required positional argument: 'factor')"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "LinearRoPE's factor must be at least 1, not 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 (Qwen3ForCausalLM ignores it)"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} (GPT+ has no quantised weights)"),
        ({"model_type": "gpt2"}, "model_type='gpt2', which GPT+ cannot be: choose a checkpoint of Qwen3, Llama, Mistr"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but the weights are those of 3"),
        ({"vocab_size": 30}, "vocab_size is 30, but its weights are those of vocab_size=29: choose another"),
        ({"head_dim": 24}, "size mismatch for model.blocks.0.W_q.weight"),
        ({"num_key_value_heads": 3}, "n_kv_heads=3 does not divide model.n_heads=4"),
        ({"rms_norm_eps": "small"}, "norm_eps is 'small', which cannot be read as float"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"layer_types": 3}, "config.json cannot be read (layer_types is int in place of list)"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "SlidingWindow's width must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_gpt_cannot_be_is_refused(changes, complaint, qwen3: Path, capsys) -> None:
    edit(qwen3, **changes)
    assert complaint in refusal(qwen3, capsys)


def test_values_of_no_such_type_are_refused(tmp_path: Path, capsys) -> None:
    """In one sentence, whatever a config.json from anywhere has."""
    published("SmolLM3-3B", tmp_path / "theirs")
    whole = (tmp_path / "theirs" / "config.json").read_text()
    for changes in (
        {"rope_scaling": [1]}, {"rope_scaling": {"rope_type": {"a": 1}}}, {"rope_theta": "x"}, {"no_rope_layers": 1},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, {"partial_rotary_factor": {"a": 1}},
        {"head_dim": 10**30}, {"head_dim": -4}, {"num_key_value_heads": 0}, {"tie_word_embeddings": 3},
        {"model_type": {}}, {"hidden_act": []}, {"hidden_size": 10**30},
    ):  # fmt: skip
        (tmp_path / "theirs" / "config.json").write_text(json.dumps({**json.loads(whole), **changes}))
        refusal(tmp_path / "theirs", capsys)


def change_weights(folder: Path, **tensors: torch.Tensor) -> None:
    """Write all tensors into one file, some of them changed."""
    held = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for file in folder.glob("model*"):
        file.unlink()
    save_file({**held, **tensors}, folder / "model.safetensors")


def test_a_head_beside_a_tied_embedding_is_compared(tmp_path: Path, capsys) -> None:
    embedding = published("SmolLM2-135M", tmp_path / "theirs").get_input_embeddings().weight.detach()
    change_weights(tmp_path / "theirs", **{"lm_head.weight": embedding.clone()})
    import_model(tmp_path / "theirs", tmp_path / "same")
    change_weights(tmp_path / "theirs", **{"lm_head.weight": embedding + 1})
    complaint = "a head (lm_head.weight) that is not the embedding: set tie_word_embeddings to false"
    assert complaint in refusal(tmp_path / "theirs", capsys)
    edit(tmp_path / "theirs", tie_word_embeddings=False)
    loaded = load_checkpoint(str(import_model(tmp_path / "theirs", tmp_path / "head")), "cpu")
    torch.testing.assert_close(loaded.model.model.head.weight, embedding + 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_are_no_weights_are_refused(dtype: torch.dtype, qwen3: Path, capsys) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(qwen3, **{name: torch.zeros(80, 48).to(dtype)})
    assert f"model.safetensors has {name} of {dtype}, and GPT+ no quantised weights" in refusal(qwen3, capsys)


def test_damaged_folders_are_refused(qwen3: Path, capsys) -> None:
    _, second, *_ = sorted(qwen3.glob("model-*.safetensors"))
    second.write_bytes(second.read_bytes()[:-50])
    assert f"{second.name} cannot be read" in refusal(qwen3, capsys)
    second.unlink()
    assert "GPT+ cannot be the model in" in refusal(qwen3, capsys)
    for file in qwen3.glob("model-*.safetensors"):
        file.unlink()
    assert "has no model.safetensors: anlit import reads safetensors" in refusal(qwen3, capsys)
    (qwen3 / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(qwen3, capsys)
