"""Checkpoints of transformers read as GPT+: the same logits, or one sentence that says why not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from anlit import GPT, Plain, RoPE
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.evaluation.generation import Separator
from anlit.evaluation.tokenizer import load_checkpoint_tokenizer
from anlit.hub.config_json import unknown_keys
from anlit.hub.families import FAMILIES
from anlit.training.initial_weights import load_initial_weights
from anlit.training.load_model import load_checkpoint
from tests.data.reader import edit
from tests.evaluation.saved import save, small
from tests.hub.published import CASES, published, read
from tests.nn.models.tiny import random_tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

TOKENS = random_tokens(3, 24)


def import_model(source: Path, output: Path, *more: str) -> Path:
    assert main(["import", str(source), "--output", str(output), *more]) == 0
    return output


def exported(source: Path, output: Path) -> Any:
    """What transformers reads after `anlit export`."""
    assert main(["export", str(source), "--format", "huggingface", "--output", str(output)]) == 0
    return read(output, trust=False)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_family_comes_in_and_goes_back(case, tmp_path: Path) -> None:
    """The same logits as transformers', and out again in the same class with the same weights."""
    hub_model = published(case, tmp_path / "theirs")
    loaded = load_checkpoint(str(import_model(tmp_path / "theirs", tmp_path / "ours")), "cpu")
    assert (loaded.architecture, loaded.training_length) == ("GPT", 64)
    assert loaded.model.model.n_parameters() == sum(
        parameter.numel() for parameter in hub_model.parameters()
    )
    expected = hub_model(TOKENS).logits
    assert expected.std() > 0.5, "logits near zero would agree whatever the network"
    torch.testing.assert_close(loaded.model(TOKENS), expected, rtol=1e-4, atol=1e-4)

    back = exported(tmp_path / "ours", tmp_path / "back")
    assert type(back) is type(hub_model)
    torch.testing.assert_close(back.state_dict(), hub_model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(back(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_a_family_is_read_or_known_to_have_no_effect(model_type) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    keys = config.to_dict().keys()

    assert unknown_keys(dict.fromkeys(keys, "a value")) == []


def test_a_key_that_is_not_read_is_named(qwen3: Path, tmp_path: Path, capsys) -> None:
    edit(qwen3 / "config.json", lambda config: config.update(logit_cap=30.0, interleaved=False))

    import_model(qwen3, tmp_path / "gpt")

    assert "config.json has 'logit_cap', which anlit does not read" in capsys.readouterr().out


def test_a_run_from_imported_weights_remembers_the_family(tmp_path: Path) -> None:
    """A Mistral without a window is a Llama but for its name."""
    published("Mistral-7B-v0.3", tmp_path / "theirs")
    imported_folder = import_model(tmp_path / "theirs", tmp_path / "ours")
    model = load_checkpoint(str(imported_folder), "cpu").model.requires_grad_(True)
    load_initial_weights(model, str(imported_folder))
    file = save(model, tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert type(exported(file, tmp_path / "back")).__name__ == "MistralForCausalLM"


@pytest.mark.parametrize("context_length", [16, 128])
def test_what_comes_out_again_has_the_longest_context_of_import_and_training(
    context_length: int, tmp_path: Path
) -> None:
    published("Qwen3-0.6B", tmp_path / "theirs")
    length = str(context_length)
    imported_folder = import_model(
        tmp_path / "theirs", tmp_path / "ours", "--context_length", length
    )
    model = load_checkpoint(str(imported_folder), "cpu").model.requires_grad_(True)
    load_initial_weights(model, str(imported_folder))
    file = save(model, tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main(["export", str(file), "--output", str(tmp_path / "copy")]) == 0
    for number, source in enumerate((imported_folder, file, tmp_path / "copy")):
        config = exported(source, tmp_path / f"back {number}").config
        assert config.max_position_embeddings == max(64, context_length)


def test_an_imported_model_keeps_its_tokenizer(tmp_path: Path, capsys) -> None:
    """A Llama has never read a text without its `<s>`, so a prompt begins with it, and a text is scored after it."""
    hub_model = published("Llama-2-7b", tmp_path / "theirs", vocab_size=300)
    tokenizer = train_bpe(["abc"], 260)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    (tmp_path / "theirs" / "tokenizer.json").write_text(tokenizer.to_str())
    imported_folder = import_model(tmp_path / "theirs", tmp_path / "ours", "--context_length", "16")
    capsys.readouterr()
    assert main(["generate", str(imported_folder), "abcba", "--max_tokens=1", "--json"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    tokens = tokenizer.encode("abcba", add_special_tokens=False).ids
    whole = [special[0][1], *tokens]
    assert json.loads(line)["prompt_tokens"] == whole
    (tmp_path / "text.txt").write_text("abcba")
    assert (
        main(
            [
                "score",
                str(imported_folder),
                str(tmp_path / "text.txt"),
                "--output",
                str(tmp_path / "scores.parquet"),
            ]
        )
        == 0
    )
    table = pq.read_table(tmp_path / "scores.parquet").to_pydict()
    expected = (
        hub_model(torch.tensor([whole]))
        .logits.log_softmax(-1)[0, range(len(tokens)), tokens]
        .tolist()
    )
    assert table["log_likelihood"] == pytest.approx(expected, abs=1e-5)
    assert (table["token"], table["n_context"]) == (tokens, list(range(len(tokens))))
    loaded = load_checkpoint(str(imported_folder), "cpu")
    assert (load_checkpoint_tokenizer(loaded).separator, loaded.training_length) == (
        Separator(7, "end"),
        16,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    published("Qwen3-0.6B", folder := tmp_path_factory.mktemp("published") / "qwen3")
    return folder


@pytest.fixture
def qwen3(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "qwen3"))


def refused(folder: Path, refusal: Callable[..., str]) -> str:
    """The one sentence with which a folder is refused; nothing is written."""
    sentence = refusal("import", folder, "--output", folder.parent / "gpt")
    assert not (folder.parent / "gpt").exists()
    return sentence


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"hidden_act": "relu", "mlp_bias": True}, "hidden_act='relu' (the MLP of GPT+ is a SwiGLU), mlp_bias=True ("),
    ({"rope_scaling": {"type": "longrope"}}, "rope_type='longrope' (GPT+ has default, linear, llama3, yarn)"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1}}, "rope_parameters.mscale (the positions of"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "no rope_parameters.high_freq"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 (Qwen3ForCausalLM ignores it)"),
    ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} (GPT+ has no quantised weights)"),
    ({"model_type": "gpt2"}, "model_type='gpt2', an architecture that GPT+ does not include: choose a checkpoint of"),
    ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but the weights have 3"),
    ({"head_dim": 24}, "size mismatch for model.blocks.0.W_q.weight"),
    ({"num_key_value_heads": 3}, "n_kv_heads=3 does not divide model.n_heads=4"),
    ({"num_attention_heads": None}, "has no num_attention_heads"),
    ({"layer_types": 3}, "config.json cannot be read (layer_types is int in place of list)"),
    ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "SlidingWindow's width must be"),
    # in one sentence, whatever a config.json from anywhere has
    *(({key: value}, "") for key, value in (
        ("rope_scaling", {"rope_type": {"a": 1}}), ("rope_theta", "x"), ("head_dim", 10**30), ("head_dim", -4),
        ("num_key_value_heads", 0), ("tie_word_embeddings", 3), ("hidden_act", []),
    )),
], ids=str)  # fmt: skip
def test_what_gpt_cannot_represent_is_refused(changes, complaint, qwen3: Path, refusal) -> None:
    edit(qwen3 / "config.json", lambda record: record.update(changes))
    assert complaint in refused(qwen3, refusal)


def test_a_folder_with_custom_code_is_refused_with_the_way_to_an_anlit_folder(
    tmp_path: Path, refusal
) -> None:
    """No architecture of transformers has a rotation of half the dimensions."""
    model = small(GPT, attention=Plain(), positions=RoPE(fraction=0.5))
    file = save(model, tmp_path / "run" / "checkpoints" / "last.ckpt")
    folder = tmp_path / "theirs"
    assert main(["export", str(file), "--format=huggingface", f"--output={folder}"]) == 0

    sentence = refused(folder, refusal)

    assert "model_type='anlit_gpt'" in sentence
    assert "write a folder that anlit loads by anlit export without --format" in sentence


def change_weights(folder: Path, **tensors: torch.Tensor) -> None:
    """Write all tensors into one file, some of them changed."""
    held = {
        key: tensor
        for file in folder.glob("*.safetensors")
        for key, tensor in load_file(file).items()
    }
    for file in folder.glob("model*"):
        file.unlink()
    save_file({**held, **tensors}, folder / "model.safetensors")


def test_a_head_beside_a_tied_embedding_is_compared(tmp_path: Path, refusal) -> None:
    embedding = published("Qwen3-0.6B", tmp_path / "theirs").get_input_embeddings().weight.detach()
    change_weights(tmp_path / "theirs", **{"lm_head.weight": embedding.clone()})
    import_model(tmp_path / "theirs", tmp_path / "same")
    change_weights(tmp_path / "theirs", **{"lm_head.weight": embedding + 1})
    complaint = (
        "a head (lm_head.weight) that is not the embedding: set tie_word_embeddings to false"
    )
    assert complaint in refused(tmp_path / "theirs", refusal)
    edit(
        tmp_path / "theirs" / "config.json", lambda record: record.update(tie_word_embeddings=False)
    )
    loaded = load_checkpoint(str(import_model(tmp_path / "theirs", tmp_path / "head")), "cpu")
    torch.testing.assert_close(loaded.model.model.head.weight, embedding + 1)


def test_damaged_folders_are_refused(qwen3: Path, refusal) -> None:
    _, second, *_ = sorted(qwen3.glob("model-*.safetensors"))
    second.write_bytes(second.read_bytes()[:-50])
    assert f"{second.name} cannot be read" in refused(qwen3, refusal)
    second.unlink()
    assert f"names {second.name}, which is not there" in refused(qwen3, refusal)
    for file in qwen3.glob("model*"):
        file.unlink()
    assert "has no model.safetensors and no model.safetensors.index.json" in refused(qwen3, refusal)
    (qwen3 / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(qwen3, refusal)


def test_numbers_that_are_no_weights_are_refused(qwen3: Path, refusal) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for dtype in (torch.int8, torch.float8_e4m3fn):
        change_weights(qwen3, **{name: torch.zeros(80, 48).to(dtype)})
        assert f"model.safetensors has {name} of {dtype}, and GPT+ no quantised weights" in refused(
            qwen3, refusal
        )
