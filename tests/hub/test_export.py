"""Exported models, for anlit and for transformers: the same logits, and `generate` of transformers decodes the same."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anlit import (
    GPT,
    NGPT,
    AnGPT,
    DynamicNTK,
    LinearRoPE,
    Llama3RoPE,
    NoPE,
    PositionsPattern,
    PRoPE,
    RoPE,
    YaRN,
)
from anlit.cli import main
from anlit.config.objects import parameters_of
from anlit.data.tokenizer import END_OF_DOCUMENT, load_tokenizer
from anlit.errors import UserError
from anlit.evaluation.generation import Request, Sampling, generate
from anlit.hub.custom_code import CODE_FILES
from anlit.hub.export import write_huggingface
from anlit.hub.translated_settings import (
    CONFIG_SETTINGS,
    CUSTOM_CODE_SETTINGS,
    INNER_MECHANISMS,
    MECHANISMS,
    POSITIONS,
    SETTINGS_IN_WEIGHTS,
    TRAINING_SETTINGS,
    settings_with_defaults,
)
from anlit.nn.models.gpt import GPTConfig
from anlit.training import models as architectures
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import Checkpoint, load_checkpoint
from anlit.training.models import FoldedAnGPT
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, make_run_with_text, prepare, save, small
from tests.hub.published import read
from tests.nn.attention.examples import SHIPPED, LogNWithSlopes
from tests.nn.models.tiny import jolt, random_tokens, tiny

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

PROMPT = random_tokens(2, 12)
N_NEW = 6
SCALED = PositionsPattern([Llama3RoPE(8.0, 8), YaRN(4.0, 8, attention_factor=1.0)])


def loud(architecture: Any, **changes: Any) -> LanguageModel:
    """A tiny model off its initial values whose logits are not near zero."""
    large = {"init_std": 0.2} if architecture is GPT else {"s_z_init": 8.0}
    return jolt(tiny(architecture, **{**large, **changes}))


def write(model: LanguageModel, folder: Path) -> Path:
    checkpoint = Checkpoint(
        model.eval().requires_grad_(False), folder / "best.ckpt", 1, None, None, {}
    )
    write_huggingface(checkpoint, folder, None)
    return folder


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_an_exported_model_is_the_same_wherever_its_folder_goes(
    architecture, tmp_path: Path, capsys
) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), architecture)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert "config.json, model.safetensors" in capsys.readouterr().out
    moved, original = (
        shutil.move(tmp_path / "out", tmp_path / "elsewhere"),
        load_checkpoint(str(run), "cpu"),
    )
    shutil.rmtree(run)
    loaded = load_checkpoint(str(moved), "cpu")
    tokens = random_tokens(2, 12, vocab_size=VOCABULARY)
    # Weights are the same numbers; logits are to rounding, which depends on where in memory the weights lie.
    expected = original.model.state_dict()
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded.model(tokens), original.model(tokens), rtol=1e-4, atol=1e-4)
    for name in ("step", "label", "architecture", "trained_on", "settings"):
        assert getattr(loaded, name) == getattr(original, name)


FORMS = pytest.mark.parametrize("form", [[], ["--fold"], ["--format", "huggingface"]], ids=str)


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_weights_are_float32_whatever_the_run_was_trained_in(
    dtype, form, tmp_path: Path
) -> None:
    file = save(small(AnGPT).to(dtype), tmp_path / "a.ckpt")
    assert main(["export", str(file), "--output", str(tmp_path / "out"), *form]) == 0
    assert {
        tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()
    } == {torch.float32}


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_have_the_precision_that_is_asked_for(
    dtype: str, form: list[str], tmp_path: Path
) -> None:
    file, out = save(small(AnGPT), tmp_path / "a.ckpt"), tmp_path / "out"
    assert main(["export", str(file), "--output", str(out), "--dtype", dtype, *form]) == 0
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    if form == ["--format", "huggingface"]:
        assert read(out, trust=True).dtype == getattr(torch, dtype)
    else:
        exact = load_checkpoint(str(file), "cpu").model(PROMPT)
        rounded = load_checkpoint(str(out), "cpu").model(PROMPT)
        torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


def test_a_precision_that_cannot_hold_a_weight_is_refused(tmp_path: Path, capsys) -> None:
    model = small(GPT)
    with torch.no_grad():
        model.model.head.weight[0, 0] = 1e6
    file = save(model, tmp_path / "a.ckpt")
    command = ["export", str(file), "--output", str(tmp_path / "out"), "--dtype"]
    assert main([*command, "float16"]) == 2
    assert "--dtype float16 cannot hold head.weight, which reaches 1e+06" in capsys.readouterr().err
    assert main([*command, "bfloat16"]) == 0


def test_the_umask_decides_who_reads_an_exported_folder(tmp_path: Path) -> None:
    file, out = save(small(GPT), tmp_path / "a.ckpt"), tmp_path / "out"
    previous = os.umask(0o027)
    try:
        assert main(["export", str(file), "--output", str(out)]) == 0
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}


@pytest.mark.parametrize("architecture", [GPT, NGPT])
def test_only_tokens_that_have_a_text_are_sampled(architecture, tmp_path: Path) -> None:
    run, out = make_run_with_text(tmp_path, architecture), tmp_path / "out"
    n_tokens = load_tokenizer(tmp_path / "data" / "tokenizer.json").get_vocab_size()
    assert n_tokens < VOCABULARY, "the vocabulary is rounded up"
    assert main(["export", str(run), "--format", "huggingface", "--output", str(out)]) == 0
    hub_model, anlit_model = read(out, trust=True), load_checkpoint(str(run), "cpu").model
    assert hub_model.config.vocab_size == n_tokens
    tokens = random_tokens(2, 12, vocab_size=n_tokens)
    torch.testing.assert_close(hub_model(tokens).logits, anlit_model(tokens)[..., :n_tokens])
    sampled = hub_model.generate(
        tokens, do_sample=True, temperature=100.0, num_return_sequences=20, max_new_tokens=20
    )
    assert sampled.max() < n_tokens


def greedy(model, prompt: list[int]) -> list[int]:
    """The prompt with its continuation by anlit."""
    return [
        *prompt,
        *generate(model.model, [Request(prompt)], N_NEW, Sampling(temperature=0))[0].tokens,
    ]


def assert_the_same(model, hub_model, **options: Any) -> None:
    """The same logits, and the same tokens in a batch of prompts of two lengths, padded on the left."""
    with torch.no_grad():
        logits = model(PROMPT)
        assert logits.std() > 0.5, "logits near zero would agree whatever the network"
        torch.testing.assert_close(hub_model(PROMPT).logits, logits, rtol=1e-4, atol=1e-4)
    short, mask = PROMPT.clone(), torch.ones_like(PROMPT)
    short[1, :5], mask[1, :5] = 0, 0
    generation_options = {
        "attention_mask": mask,
        "max_new_tokens": N_NEW,
        "do_sample": False,
        **options,
    }
    generated = hub_model.generate(short, **generation_options).tolist()
    prompts = short[0].tolist(), short[1, 5:].tolist()
    assert [generated[0], generated[1][5:]] == [greedy(model, prompt) for prompt in prompts]


@pytest.mark.parametrize(("settings", "name"), [
    ({"positions": RoPE(fraction=1.0, base=5000.0), "norm_eps": 1e-3}, "Qwen3ForCausalLM"),
    ({"positions": RoPE(fraction=1.0), "qk_norm": False, "d_ff": 80}, "LlamaForCausalLM"),
    ({"positions": YaRN(4.0, 8, fraction=1.0), "n_kv_heads": 1, "d_head": 24, "qk_norm_gain": False,
      "tie_embeddings": True}, "Qwen3ForCausalLM"),
], ids=["norm", "Llama", "YaRN"])  # fmt: skip
def test_gpt_takes_an_architecture_of_transformers_and_comes_back(
    settings, name, tmp_path: Path
) -> None:
    model = loud(GPT, **settings)
    hub_model = read(write(model, tmp_path / "out"), trust=False)
    assert type(hub_model).__name__ == name
    assert_the_same(model, hub_model)
    assert main(["import", str(tmp_path / "out"), "--output", str(tmp_path / "back")]) == 0
    back = load_checkpoint(str(tmp_path / "back"), "cpu").model
    torch.testing.assert_close(back(PROMPT), model(PROMPT), rtol=1e-4, atol=1e-4)


WITHOUT_CODE: set[str] = set()
"""Names of `SHIPPED` that `anlit export --format huggingface` refuses."""


@pytest.mark.parametrize("mechanism", [name for name in SHIPPED if name not in WITHOUT_CODE])
def test_every_mechanism_in_code_of_its_own(mechanism, tmp_path: Path) -> None:
    architecture = (GPT, NGPT, AnGPT)[list(SHIPPED).index(mechanism) % 3]
    positions = (PRoPE(), RoPE(), NoPE())[
        list(SHIPPED).index(mechanism) % 2 + (mechanism == "alibi")
    ]
    model = loud(architecture, attention=SHIPPED[mechanism], positions=positions, n_layers=2)
    assert_the_same(model, read(write(model, tmp_path / "out"), trust=True))


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT, FoldedAnGPT])
@pytest.mark.parametrize("settings", [
    {"qk_norm": False, "attention_gate": "per_head", "v_norm": True},
    {"attention_gate": "per_element", "post_norm": True, "attention_norm": True},
    {"qk_norm_eps": 0.5, "qk_norm_gain": True, "positions": RoPE(fraction=0.25, base=500.0)},
    {"qk_norm_eps": 0.5, "qk_norm_gain": False, "v_norm": True},
    {"n_kv_heads": 1, "d_head": 24, "attention_gate": "per_element", "positions": LinearRoPE(factor=2.0)},
    {"n_kv_heads": 2, "n_heads": 4, "qk_norm_gain": False, "positions": SCALED},
], ids=str)  # fmt: skip
@pytest.mark.covering(1)
def test_every_gate_and_norm_in_code_of_its_own(architecture, settings, tmp_path: Path) -> None:
    model = loud(architecture, **settings)
    assert_the_same(model, read(write(model, tmp_path / "out"), trust=True))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_is_read_under_the_name_of_every_transformers(name: str, tmp_path: Path) -> None:
    model = loud(AnGPT, attention=SHIPPED["window, log n"])
    hub_model, cache = read(write(model, tmp_path / "out"), trust=True), transformers.DynamicCache()
    for chunk in (PROMPT[:, :-1], PROMPT[:, -1:]):
        logits = hub_model(chunk, **{name: cache}).logits
    torch.testing.assert_close(logits[:, -1], hub_model(PROMPT).logits[:, -1], rtol=1e-5, atol=1e-5)
    assert_the_same(model, hub_model, use_cache=False)


def test_a_run_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the tokenizer without code, and anlit does not take the folder for its own."""
    from transformers import dynamic_module_utils

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("code was fetched, or asked for")

    run, out, text = (
        make_run_with_text(tmp_path, AnGPT),
        tmp_path / "out",
        "the naïve cat\n  sat – ☕",
    )
    tokens = load_tokenizer(tmp_path / "data" / "tokenizer.json").encode(text).ids
    assert main(["export", str(run), "--format", "huggingface", "--output", str(out)]) == 0
    model = read(out, trust=True)
    generation = model.generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (END, END)
    monkeypatch.setattr(dynamic_module_utils, "get_class_from_dynamic_module", refuse)
    monkeypatch.setattr("builtins.input", refuse)
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        hub_tokenizer = transformers.AutoTokenizer.from_pretrained(out, **trust)
        assert (hub_tokenizer(text)["input_ids"], hub_tokenizer.decode(tokens)) == (tokens, text)
        assert (hub_tokenizer.eos_token, hub_tokenizer.eos_token_id) == (END_OF_DOCUMENT, END)
    assert main(["lengths", str(out), "--output", str(tmp_path / "report")]) == 2


def test_the_code_needs_torch_and_transformers_alone() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in CODE_FILES)
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imported <= {"torch", "transformers", "collections", "functools", "math", "typing"}


@pytest.mark.parametrize(
    "settings", [{"positions": DynamicNTK()}, {"attention": LogNWithSlopes()}], ids=str
)
def test_what_the_code_has_no_form_for_is_refused(settings, tmp_path: Path) -> None:
    ((key, setting),) = settings.items()
    with pytest.raises(
        UserError, match=f"--format huggingface cannot hold {key} {type(setting).__name__}"
    ):
        write(loud(GPT, **settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


EXPORTED = [GPT, NGPT, AnGPT]
REFUSED = {"s_qk"}
"""Settings of the models that no code for transformers supports."""


@pytest.mark.parametrize("architecture", EXPORTED)
def test_every_setting_of_a_model_is_translated_or_refused(architecture) -> None:
    names = {name for name, _, _ in settings_with_defaults(architecture, {})}
    translated = CONFIG_SETTINGS | CUSTOM_CODE_SETTINGS | SETTINGS_IN_WEIGHTS | TRAINING_SETTINGS

    assert "qk_norm" in names
    assert names - translated <= REFUSED


def test_no_table_of_settings_names_a_setting_that_is_gone() -> None:
    names = set()
    for architecture in EXPORTED:
        names.update(name for name, _, _ in settings_with_defaults(architecture, {}))

    tables = (CONFIG_SETTINGS, CUSTOM_CODE_SETTINGS, SETTINGS_IN_WEIGHTS, TRAINING_SETTINGS)
    assert names >= set().union(*tables)


@pytest.mark.parametrize("kind", [*MECHANISMS, *POSITIONS])
def test_every_argument_of_mechanisms_and_positions_is_translated(kind) -> None:
    translated = set(POSITIONS.get(kind, INNER_MECHANISMS))
    translated.update(*MECHANISMS.get(kind, ()))

    assert {parameter.name for parameter in parameters_of(kind)} <= translated


def test_a_setting_that_the_export_does_not_translate_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    @dataclass(frozen=True)
    class CappedConfig(GPTConfig):
        logit_cap: float | None = None

    monkeypatch.setattr(architectures, "GPTConfig", CappedConfig)
    full_rotation = RoPE(fraction=1.0)

    write(loud(GPT, positions=full_rotation), tmp_path / "default")
    with pytest.raises(UserError, match=r"cannot hold logit_cap=30\.0, which its code"):
        write(loud(GPT, positions=full_rotation, logit_cap=30.0), tmp_path / "changed")

    assert (tmp_path / "default" / "config.json").is_file()
    assert not (tmp_path / "changed").exists()


def test_a_learned_s_qk_of_angpt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot hold s_qk=True"):
        write(loud(AnGPT, s_qk=True), tmp_path / "out")


class SwappedRoPE(RoPE):
    """RoPE with an argument more."""

    def __init__(self, fraction: float = 1.0, base: float = 10_000.0, swapped: bool = False):
        super().__init__(fraction, base)
        self.swapped = swapped


def test_an_argument_of_positions_that_the_export_does_not_translate_is_refused(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(POSITIONS, SwappedRoPE, POSITIONS[RoPE])

    write(loud(GPT, positions=SwappedRoPE()), tmp_path / "default")
    with pytest.raises(UserError, match=r"cannot hold SwappedRoPE\.swapped=True"):
        write(loud(GPT, positions=SwappedRoPE(swapped=True)), tmp_path / "changed")
