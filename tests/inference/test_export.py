"""Exported models, for anlit and for transformers: the same logits, and `generate` of transformers decodes the same."""

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anlit import GPT, NGPT, AnGPT, DynamicNTK, LinearRoPE, NoPE, PositionsPattern, PRoPE, RoPE, YaRN
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import END_OF_DOCUMENT, load_tokenizer
from anlit.errors import UserError
from anlit.inference.export import write_huggingface
from anlit.inference.huggingface.custom_code import CODE
from anlit.models.fold import FoldedAnGPT
from tests.attention.examples import SHIPPED, LogNWithSlopes
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, prepare
from tests.inference.huggingface_folders import checkpoint, decoded, loud, read, write
from tests.inference.with_text import make_run_with_text
from tests.models.tiny import random_tokens

transformers = pytest.importorskip("transformers")

PROMPT = random_tokens(3, 12)
N_NEW = 6
YARN: dict[str, Any] = {"factor": 4.0, "training_length": 8, "attention_factor": 1.0}


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_an_exported_model_gives_the_same_logits_wherever_its_folder_goes(architecture, tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), architecture)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert "config.json, model.safetensors" in capsys.readouterr().out
    moved = Path(shutil.move(tmp_path / "out", tmp_path / "elsewhere"))
    original = load_checkpoint(str(run), "cpu")
    shutil.rmtree(run)
    loaded, tokens = load_checkpoint(str(moved), "cpu"), random_tokens(2, 12, vocab_size=VOCABULARY)
    assert torch.equal(loaded.model(tokens), original.model(tokens))
    for name in ("step", "label", "trained_on"):
        assert getattr(loaded, name) == getattr(original, name)
    weights, decoder = load_file(moved / "model.safetensors"), original.model.model.state_dict()
    torch.testing.assert_close(weights, dict(decoder), rtol=0, atol=0)
    record = json.loads((moved / "config.json").read_text())
    assert record["architecture"] == architecture.__name__
    assert record["settings"]["attention"]["class_path"].endswith("ScaleInvariant")


def assert_the_same(model, theirs) -> None:
    with torch.no_grad():
        logits = model(PROMPT)
        assert logits.std() > 0.5, "logits near zero would agree whatever the network"
        torch.testing.assert_close(theirs(PROMPT).logits, logits, rtol=1e-5, atol=1e-5)
    mask = torch.ones_like(PROMPT)
    generated = theirs.generate(PROMPT, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False)
    assert torch.equal(generated, decoded(model, PROMPT, N_NEW))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"positions": RoPE(fraction=1.0, base=5000.0), "norm_eps": 1e-3}, "Qwen3ForCausalLM"),
        ({"positions": RoPE(fraction=1.0), "qk_norm_gain": False}, "Qwen3ForCausalLM"),
        ({"positions": RoPE(fraction=1.0), "qk_norm": False, "d_ff": 80}, "LlamaForCausalLM"),
        ({"positions": RoPE(fraction=1.0), "n_kv_heads": 1, "d_head": 24, "tie_embeddings": True}, "Qwen3ForCausalLM"),
        ({"positions": YaRN(4.0, 8, fraction=1.0), "n_kv_heads": 1, "d_head": 24}, "Qwen3ForCausalLM"),
    ],
    ids=str,
)
def test_gpt_takes_an_architecture_of_transformers_and_comes_back(settings, name, tmp_path: Path) -> None:
    model = loud(GPT, **settings)
    theirs = read(write(model, tmp_path / "out"), trust=False)
    assert type(theirs).__name__ == name
    assert sum(p.numel() for p in theirs.parameters()) - model.model.n_parameters() in (0, 2 * 16 * 2)
    assert_the_same(model, theirs)
    assert main(["import", str(tmp_path / "out"), "--output", str(tmp_path / "back")]) == 0
    assert torch.equal(load_checkpoint(str(tmp_path / "back"), "cpu").model(PROMPT), model(PROMPT))


@pytest.mark.usefixtures("own_code_cache")
@pytest.mark.parametrize("mechanism", SHIPPED)
def test_every_mechanism_in_code_of_its_own(mechanism, tmp_path: Path) -> None:
    architecture = (GPT, NGPT, AnGPT)[list(SHIPPED).index(mechanism) % 3]
    positions = (PRoPE(), RoPE(), NoPE())[list(SHIPPED).index(mechanism) % 2 + (mechanism == "alibi")]
    model = loud(architecture, attention=SHIPPED[mechanism], positions=positions, n_layers=2)
    assert_the_same(model, read(write(model, tmp_path / "out"), trust=True))


@pytest.mark.usefixtures("own_code_cache")
@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT, FoldedAnGPT])
@pytest.mark.parametrize(
    "settings",
    [
        {"qk_norm": False, "attention_gate": "per_head", "v_norm": True},
        {"attention_gate": "per_element", "post_norm": True, "attention_norm": True},
        {"qk_norm_eps": 0.5, "qk_norm_gain": True, "positions": RoPE(fraction=0.25, base=500.0)},
        {"qk_norm_eps": 0.5, "qk_norm_gain": False, "v_norm": True},
        {"n_kv_heads": 1, "d_head": 24, "attention_gate": "per_element", "positions": LinearRoPE(factor=2.0)},
        {"n_kv_heads": 2, "n_heads": 4, "qk_norm_gain": False, "positions": PositionsPattern([NoPE(), YaRN(**YARN)])},
    ],
    ids=str,
)
@pytest.mark.covering(1)
def test_every_gate_and_norm_in_code_of_its_own(architecture, settings, tmp_path: Path) -> None:
    model = loud(architecture, **settings)
    assert_the_same(model, read(write(model, tmp_path / "out"), trust=True))


@pytest.mark.usefixtures("own_code_cache")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_is_read_under_the_name_of_every_transformers(name: str, tmp_path: Path) -> None:
    theirs = read(write(loud(AnGPT, attention=SHIPPED["window, log n"]), tmp_path / "out"), trust=True)
    cache = transformers.DynamicCache()
    for part in (PROMPT[:, :-1], PROMPT[:, -1:]):
        logits = theirs(part, **{name: cache}).logits
    torch.testing.assert_close(logits[:, -1], theirs(PROMPT).logits[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("own_code_cache")
@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_prompts_of_different_lengths_in_one_batch(architecture, tmp_path: Path) -> None:
    model = loud(architecture, attention=SHIPPED["window, log n"], positions=PRoPE())
    theirs = read(write(model, tmp_path / "out"), trust=True)
    short, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    short[1, :5], mask[1, :5] = 0, 0  # padded on the left
    greedy: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": N_NEW, "do_sample": False}
    for use_cache in (True, False):
        generated = theirs.generate(short, **greedy, use_cache=use_cache)
        assert torch.equal(generated[1:2, 5:], decoded(model, PROMPT[1:2, 5:], N_NEW))
        assert torch.equal(generated[:1], decoded(model, PROMPT[:1], N_NEW))


@pytest.mark.usefixtures("own_code_cache")
def test_a_run_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("code was fetched, or asked for")

    run, out, text = make_run_with_text(tmp_path, AnGPT), tmp_path / "out", "the naïve cat\n  sat – ☕"
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer.json")
    assert main(["export", str(run), "--format", "huggingface", "--output", str(out)]) == 0
    model, own = read(out, trust=True), load_checkpoint(str(run), "cpu").model
    torch.testing.assert_close(model(PROMPT).logits, own(PROMPT), rtol=1e-5, atol=1e-5)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (END, END)
    monkeypatch.setattr(dynamic_module_utils, "get_class_from_dynamic_module", refuse)
    monkeypatch.setattr("builtins.input", refuse)
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        theirs = transformers.AutoTokenizer.from_pretrained(out, **trust)
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
        assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_DOCUMENT, END)
    for command in (["lengths", str(out), "--output", str(tmp_path / "report")], ["export", str(out), "--output", "x"]):
        assert main(command) == 2  # what transformers reads, anlit does not take for its own


def test_the_code_needs_torch_and_transformers_alone() -> None:
    for node in ast.walk(ast.parse(CODE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "anlit"]
            assert {name.split(".")[0] for name in names} <= {"torch", "transformers", "math", "typing"}


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"positions": DynamicNTK()}, "positions DynamicNTK"), ({"attention": LogNWithSlopes()}, "attention LogNWithSl")],
    ids=["positions", "attention"],
)
def test_what_the_code_has_no_form_for_is_refused(settings, what, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--format huggingface cannot hold {what}"):
        write_huggingface(checkpoint(loud(GPT, **settings), tmp_path), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
