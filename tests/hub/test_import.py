"""Checkpoints of transformers read as GPT+: the same logits, or a sentence with the reason."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy

from anlit import GPT, NGPT, AnGPT, Plain, RoPE
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.evaluation.generation import Separator
from anlit.evaluation.tokenizer import load_checkpoint_tokenizer
from anlit.hub.config_json import unknown_keys
from anlit.hub.families import FAMILIES
from anlit.training.initial_weights import load_initial_weights
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import Checkpoint, load_checkpoint
from tests.data.reader import edit
from tests.evaluation.saved import save, small
from tests.evaluation.test_generate_command import generate_records
from tests.hub.models import export, export_to_transformers, import_model, read
from tests.hub.published import CASES, published
from tests.nn.models.tiny import random_tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

TOKENS = random_tokens(3, 24)


def load_imported(source: Path, output: Path) -> Checkpoint:
    """The model that `anlit import` makes of `source`."""
    return load_checkpoint(str(import_model(source, output)), "cpu")


def exported(source: Path, output: Path) -> Any:
    """The model that transformers reads after `anlit export`."""
    return read(export_to_transformers(source, output), trust=False)


FAST_CASES = [case for case in CASES if case != "Mistral-Nemo"]
NEMO = pytest.param("Mistral-Nemo", marks=pytest.mark.slow)
"""Its only difference is `head_dim`, which other families have too."""


@pytest.mark.parametrize("case", [*FAST_CASES, NEMO])
@torch.no_grad()
def test_a_family_comes_in_and_goes_back(case: str, tmp_path: Path) -> None:
    """The same logits as transformers', and out again in the same class with the same weights."""
    hub_model = published(case, tmp_path / "hub_folder")
    n_parameters = sum(parameter.numel() for parameter in hub_model.parameters())
    expected = hub_model(TOKENS).logits
    assert expected.std() > 0.5, "logits near zero would agree whatever the network"

    loaded = load_imported(tmp_path / "hub_folder", tmp_path / "imported_folder")
    back = exported(tmp_path / "imported_folder", tmp_path / "back")

    logits = loaded.model(TOKENS)
    assert loaded.architecture == "GPT"
    assert loaded.training_length == 64
    assert loaded.model.model.n_parameters() == n_parameters
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert type(back) is type(hub_model)
    torch.testing.assert_close(back.state_dict(), hub_model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(back(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_a_family_is_read_or_known_to_have_no_effect(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    keys = config.to_dict().keys()

    assert unknown_keys(dict.fromkeys(keys, "a value")) == []


def test_a_key_that_is_not_read_is_named(qwen3: Path, tmp_path: Path, capsys) -> None:
    change_config(qwen3, logit_cap=30.0, interleaved=False)

    import_model(qwen3, tmp_path / "gpt")

    assert "config.json has 'logit_cap', which anlit does not read" in capsys.readouterr().out


@pytest.mark.parametrize("context_length", [16, 128])
def test_a_run_from_imported_weights_keeps_family_and_longest_context(
    context_length: int, tmp_path: Path
) -> None:
    """A Mistral without a window is a Llama but for its name. The export goes through a copy."""
    hub_folder = tmp_path / "hub_folder"
    published("Mistral-7B-v0.3", hub_folder)
    imported_folder = tmp_path / "imported_folder"
    import_model(hub_folder, imported_folder, f"--context_length={context_length}")
    model = load_checkpoint(str(imported_folder), "cpu").model.requires_grad_(True)
    load_initial_weights(model, str(imported_folder))
    file = save(model, tmp_path / "run" / "checkpoints" / "last.ckpt")

    copy = export(file, tmp_path / "copy")
    back = exported(copy, tmp_path / "back")

    assert type(back).__name__ == "MistralForCausalLM"
    assert back.config.max_position_embeddings == max(64, context_length)


def write_tokenizer_with_frame(folder: Path) -> Tokenizer:
    """Write tokenizer.json of a tokenizer that puts `<s>` and `</s>` around a text."""
    tokenizer = train_bpe(["abc"], 260)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    end = ("</s>", tokenizer.token_to_id("</s>"))
    tokenizer.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=[begin, end])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return tokenizer


def test_an_imported_model_keeps_its_tokenizer(tmp_path: Path, capsys) -> None:
    """A Llama has never read a text without its `<s>`.

    So a prompt begins with it, and a text is scored after it.
    """
    hub_folder = tmp_path / "hub_folder"
    hub_model = published("Llama-2-7b", hub_folder, vocab_size=300)
    tokenizer = write_tokenizer_with_frame(hub_folder)
    tokens = tokenizer.encode("abcba", add_special_tokens=False).ids
    with_begin = [tokenizer.token_to_id("<s>"), *tokens]
    text = tmp_path / "text.txt"
    text.write_text("abcba")
    table = tmp_path / "scores.parquet"

    imported_folder = import_model(hub_folder, tmp_path / "imported_folder", "--context_length=16")
    (record,) = generate_records(capsys, imported_folder, "abcba", "--max_tokens=1")
    assert main(["score", str(imported_folder), str(text), f"--output={table}"]) == 0

    assert record["prompt_tokens"] == with_begin
    rows = pq.read_table(table).to_pydict()
    (logits,) = hub_model(torch.tensor([with_begin])).logits
    expected = -cross_entropy(logits[:-1], torch.tensor(tokens), reduction="none")
    assert rows["log_likelihood"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert rows["token"] == tokens
    assert rows["n_context"] == list(range(len(tokens)))
    loaded = load_checkpoint(str(imported_folder), "cpu")
    assert loaded.training_length == 16
    assert load_checkpoint_tokenizer(loaded).separator == Separator(7, "end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "qwen3"
    published("Qwen3-0.6B", folder)
    return folder


@pytest.fixture
def qwen3(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "qwen3"))


def refused(folder: Path, refusal: Callable[..., str]) -> str:
    """The sentence that refuses a folder. Nothing is written."""
    sentence = refusal("import", folder, "--output", folder.parent / "gpt")
    assert not (folder.parent / "gpt").exists()
    return sentence


def change_config(folder: Path, **changes: Any) -> None:
    edit(folder / "config.json", lambda record: record.update(changes))


LONGROPE = {"rope_scaling": {"type": "longrope"}}
MSCALE = {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1}}
NO_FACTOR = {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
QUANTISED = {"quantization_config": {"bits": 4}}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MISFITS = [
    (
        {"hidden_act": "relu", "mlp_bias": True},
        "hidden_act='relu' (the MLP of GPT+ is a SwiGLU), mlp_bias=True (",
    ),
    (LONGROPE, "rope_type='longrope' (GPT+ has default, linear, llama3, yarn)"),
    (MSCALE, "rope_parameters.mscale (the positions of"),
    (NO_FACTOR, "no rope_parameters.high_freq"),
    (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5 (Qwen3ForCausalLM ignores it)",
    ),
    (QUANTISED, "quantization_config={'bits': 4} (GPT+ has no quantised weights)"),
    (
        {"model_type": "gpt2"},
        "model_type='gpt2', an architecture that GPT+ does not include: choose a checkpoint of",
    ),
    ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but the weights have 3"),
    ({"head_dim": 24}, "size mismatch for model.blocks.0.W_q.weight"),
    ({"num_key_value_heads": 3}, "n_kv_heads=3 does not divide model.n_heads=4"),
    ({"num_attention_heads": None}, "has no num_attention_heads"),
    (
        {"rope_scaling": 3},
        "config.json cannot be read (rope_scaling is int in place of dict)",
    ),
    (WINDOWS, "use_sliding_window (windows in some of its layers)"),
    # Some sentence, whatever a config.json from anywhere has
    ({"rope_scaling": {"rope_type": {"a": 1}}}, ""),
    ({"rope_theta": "x"}, ""),
    ({"head_dim": 10**30}, ""),
    ({"head_dim": -4}, ""),
    ({"num_key_value_heads": 0}, ""),
    ({"tie_word_embeddings": 3}, ""),
    ({"hidden_act": []}, ""),
]
"""Changes of config.json that GPT+ cannot represent, and a part of the error."""


@pytest.mark.parametrize(("changes", "complaint"), MISFITS, ids=str)
def test_a_model_that_gpt_cannot_represent_is_refused(
    changes: dict[str, Any], complaint: str, qwen3: Path, refusal
) -> None:
    change_config(qwen3, **changes)

    assert complaint in refused(qwen3, refusal)


def half_rotated() -> LanguageModel:
    """A GPT+ that no architecture of transformers is: half of the dimensions rotate."""
    return small(GPT, attention=Plain(), positions=RoPE(fraction=0.5))


@pytest.mark.parametrize(
    ("model_type", "make_model"),
    [
        ("anlit_gpt", half_rotated),
        ("anlit_ngpt", partial(small, NGPT)),
        ("anlit_angpt", partial(small, AnGPT)),
    ],
)
def test_every_command_refuses_a_folder_with_custom_code_and_names_its_origin(
    model_type: str, make_model: Callable[[], LanguageModel], tmp_path: Path, refusal
) -> None:
    """No command sends the user to another that refuses the folder too."""
    file = save(make_model(), tmp_path / "run" / "checkpoints" / "last.ckpt")
    folder = export_to_transformers(file, tmp_path / "hub_folder")
    output = ("--output", tmp_path / "out")

    for command in (
        ("import", folder, *output),
        ("export", folder, *output),
        ("generate", folder, "a"),
        ("lengths", folder, *output),
    ):
        sentence = refusal(*command)

        assert f"model_type={model_type!r}), and no command of anlit reads it: take the" in sentence
        assert sentence.endswith("run folder or the checkpoint that it was exported from")


def change_weights(folder: Path, **tensors: torch.Tensor) -> None:
    """Write all tensors into a single file, some of them changed."""
    all_tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        all_tensors |= load_file(file)
    for file in folder.glob("model*"):
        file.unlink()
    save_file({**all_tensors, **tensors}, folder / "model.safetensors")


def test_a_head_beside_a_tied_embedding_is_compared(tmp_path: Path, refusal) -> None:
    hub_folder = tmp_path / "hub_folder"
    hub_model = published("Qwen3-0.6B", hub_folder)
    embedding = hub_model.get_input_embeddings().weight.detach()

    change_weights(hub_folder, **{"lm_head.weight": embedding.clone()})
    import_model(hub_folder, tmp_path / "same")
    change_weights(hub_folder, **{"lm_head.weight": embedding + 1})
    sentence = refused(hub_folder, refusal)
    change_config(hub_folder, tie_word_embeddings=False)
    loaded = load_imported(hub_folder, tmp_path / "head")

    advice = "is not the embedding: set tie_word_embeddings to false"
    assert f"a head (lm_head.weight) that {advice}" in sentence
    torch.testing.assert_close(loaded.model.model.head.weight, embedding + 1)


def test_damaged_folders_are_refused(qwen3: Path, refusal) -> None:
    _, second, *_ = sorted(qwen3.glob("model-*.safetensors"))
    content = second.read_bytes()

    second.write_bytes(content[:-50])
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
        quantised = torch.zeros(80, 48).to(dtype)
        change_weights(qwen3, **{name: quantised})
        sentence = refused(qwen3, refusal)
        assert f"has {name} of {dtype}, and GPT+ no quantised weights" in sentence
