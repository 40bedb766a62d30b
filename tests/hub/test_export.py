"""Exported models, for anlit and for transformers.

They give the same logits, and `generate` of transformers decodes the same tokens.
"""

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
from anlit.config.objects import parameters_of
from anlit.data.tokenizer import END_OF_DOCUMENT, load_tokenizer
from anlit.errors import UserError
from anlit.hub.custom_code import CODE_FILES
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
from anlit.training.load_model import load_checkpoint
from tests.data.prepared import END, VOCABULARY
from tests.evaluation.saved import make_run, make_run_with_text, prepare, save, small
from tests.hub.models import (
    PROMPT,
    assert_the_same,
    export,
    export_to_transformers,
    import_model,
    loud,
    read,
    write,
)
from tests.nn.attention.examples import SHIPPED, LogNWithSlopes
from tests.nn.models.tiny import random_tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_code_cache")

SCALED = PositionsPattern([Llama3RoPE(8.0, 8), YaRN(4.0, 8, attention_factor=1.0)])
FOR_TRANSFORMERS = ["--format=huggingface"]
FORMS = pytest.mark.parametrize("form", [[], FOR_TRANSFORMERS], ids=str)


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a checkpoint."""
    return load_checkpoint(str(folder), "cpu").model(tokens)


def stored_dtypes(folder: Path) -> set[torch.dtype]:
    """The number formats of an exported folder's weights."""
    weights = load_file(folder / "model.safetensors")
    return {tensor.dtype for tensor in weights.values()}


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_an_exported_model_is_the_same_wherever_its_folder_goes(
    architecture: Any, tmp_path: Path, capsys
) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), architecture)
    original = load_checkpoint(str(run), "cpu")
    tokens = random_tokens(2, 12, vocab_size=VOCABULARY)

    out = export(run, tmp_path / "out")
    printed = capsys.readouterr().out
    moved = shutil.move(out, tmp_path / "elsewhere")
    shutil.rmtree(run)
    loaded = load_checkpoint(str(moved), "cpu")

    assert "config.json, model.safetensors" in printed
    # Weights are the same numbers. Logits are equal to rounding, which depends on where in memory
    # the weights lie.
    expected = original.model.state_dict()
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)
    logits = loaded.model(tokens)
    torch.testing.assert_close(logits, original.model(tokens), rtol=1e-4, atol=1e-4)
    for name in ("step", "label", "architecture", "trained_on", "settings"):
        assert getattr(loaded, name) == getattr(original, name)


@FORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_weights_are_float32_whatever_the_run_was_trained_in(
    dtype: torch.dtype, form: list[str], tmp_path: Path
) -> None:
    file = save(small(AnGPT).to(dtype), tmp_path / "a.ckpt")

    out = export(file, tmp_path / "out", *form)

    assert stored_dtypes(out) == {torch.float32}


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_have_the_precision_that_is_asked_for(
    dtype: str, form: list[str], tmp_path: Path
) -> None:
    file = save(small(AnGPT), tmp_path / "a.ckpt")

    out = export(file, tmp_path / "out", f"--dtype={dtype}", *form)

    assert stored_dtypes(out) == {getattr(torch, dtype)}
    if form == FOR_TRANSFORMERS:
        assert read(out, trust=True).dtype == getattr(torch, dtype)
    else:
        expected = logits_of(file, PROMPT)
        torch.testing.assert_close(logits_of(out, PROMPT), expected, rtol=0.05, atol=0.05)


def test_a_precision_that_cannot_hold_a_weight_is_refused(tmp_path: Path, refusal) -> None:
    model = small(GPT)
    with torch.no_grad():
        model.model.head.weight[0, 0] = 1e6
    file = save(model, tmp_path / "a.ckpt")
    out = tmp_path / "out"

    message = refusal("export", file, "--output", out, "--dtype", "float16")

    assert "--dtype float16 cannot hold head.weight, which reaches 1e+06" in message
    export(file, out, "--dtype=bfloat16")


def test_the_umask_decides_who_reads_an_exported_folder(tmp_path: Path) -> None:
    file = save(small(GPT), tmp_path / "a.ckpt")

    previous = os.umask(0o027)
    try:
        out = export(file, tmp_path / "out")
    finally:
        os.umask(previous)

    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == {0o640}


@pytest.mark.parametrize("architecture", [GPT, NGPT])
def test_only_tokens_that_have_a_text_are_sampled(architecture: Any, tmp_path: Path) -> None:
    run = make_run_with_text(tmp_path, architecture)
    n_tokens = load_tokenizer(tmp_path / "data" / "tokenizer.json").get_vocab_size()
    assert n_tokens < VOCABULARY, "the vocabulary is rounded up"
    tokens = random_tokens(2, 12, vocab_size=n_tokens)

    hub_model = read(export_to_transformers(run, tmp_path / "out"), trust=True)
    sampled = hub_model.generate(
        tokens,
        do_sample=True,
        temperature=100.0,
        num_return_sequences=20,
        max_new_tokens=20,
    )

    assert hub_model.config.vocab_size == n_tokens
    expected = logits_of(run, tokens)[..., :n_tokens]
    torch.testing.assert_close(hub_model(tokens).logits, expected)
    assert sampled.max() < n_tokens


EQUAL_ARCHITECTURES = {
    "norm": (
        {"positions": RoPE(fraction=1.0, base=5000.0), "norm_eps": 1e-3},
        "Qwen3ForCausalLM",
    ),
    "Llama": (
        {"positions": RoPE(fraction=1.0), "qk_norm": False, "d_ff": 80},
        "LlamaForCausalLM",
    ),
    "YaRN": (
        {
            "positions": YaRN(4.0, 8, fraction=1.0),
            "n_kv_heads": 1,
            "d_head": 24,
            "qk_norm_gain": False,
            "tie_embeddings": True,
        },
        "Qwen3ForCausalLM",
    ),
}
"""Settings of GPT+, and the architecture of transformers that is the same."""


@pytest.mark.parametrize("name", EQUAL_ARCHITECTURES)
def test_gpt_takes_an_architecture_of_transformers_and_comes_back(
    name: str, tmp_path: Path
) -> None:
    settings, architecture = EQUAL_ARCHITECTURES[name]
    model = loud(GPT, **settings)
    out = tmp_path / "out"
    back = tmp_path / "back"

    hub_model = read(write(model, out), trust=False)
    import_model(out, back)

    assert type(hub_model).__name__ == architecture
    assert_the_same(model, hub_model)
    logits = logits_of(back, PROMPT)
    torch.testing.assert_close(logits, model(PROMPT), rtol=1e-4, atol=1e-4)


WITHOUT_CODE: set[str] = set()
"""Names of `SHIPPED` that `anlit export --format huggingface` refuses."""
WITH_CODE = [name for name in SHIPPED if name not in WITHOUT_CODE]


@pytest.mark.parametrize("mechanism", WITH_CODE)
def test_every_mechanism_in_code_of_its_own(mechanism: str, tmp_path: Path) -> None:
    """Architectures and positions take turns."""
    number = list(SHIPPED).index(mechanism)
    architecture = (GPT, NGPT, AnGPT)[number % 3]
    positions = (PRoPE(), RoPE())[number % 2]
    if mechanism == "alibi":
        positions = NoPE()
    settings = {"attention": SHIPPED[mechanism], "positions": positions, "n_layers": 2}
    model = loud(architecture, **settings)

    hub_model = read(write(model, tmp_path / "out"), trust=True)

    assert_the_same(model, hub_model)


QUARTER = RoPE(fraction=0.25, base=500.0)
CODE_SETTINGS = [
    {"positions": PositionsPattern([NoPE(), RoPE()])},
    {"qk_norm": False, "attention_gate": "per_head", "v_norm": True},
    {"attention_gate": "per_element", "post_norm": True, "attention_norm": True},
    {"qk_norm_eps": 0.5, "qk_norm_gain": True, "positions": QUARTER},
    {"qk_norm_eps": 0.5, "qk_norm_gain": False, "v_norm": True},
    {
        "n_kv_heads": 1,
        "d_head": 24,
        "attention_gate": "per_element",
        "positions": LinearRoPE(factor=2.0),
    },
    {"n_kv_heads": 2, "n_heads": 4, "qk_norm_gain": False, "positions": SCALED},
]


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
@pytest.mark.parametrize("settings", CODE_SETTINGS, ids=str)
@pytest.mark.covering(1)
def test_every_gate_and_norm_in_code_of_its_own(
    architecture: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = loud(architecture, **settings)

    hub_model = read(write(model, tmp_path / "out"), trust=True)

    assert_the_same(model, hub_model)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_is_read_under_the_name_of_every_transformers(name: str, tmp_path: Path) -> None:
    model = loud(AnGPT, attention=SHIPPED["window, log n"])
    hub_model = read(write(model, tmp_path / "out"), trust=True)
    cache = transformers.DynamicCache()

    hub_model(PROMPT[:, :-1], **{name: cache})
    logits = hub_model(PROMPT[:, -1:], **{name: cache}).logits

    expected = hub_model(PROMPT).logits[:, -1]
    torch.testing.assert_close(logits[:, -1], expected, rtol=1e-5, atol=1e-5)
    assert_the_same(model, hub_model, use_cache=False)


def refuse_code(*arguments: object, **options: object) -> None:
    raise AssertionError("code was fetched, or asked for")


def test_a_run_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal) -> None:
    """transformers reads the tokenizer without code. anlit refuses the folder."""
    from transformers import dynamic_module_utils

    run = make_run_with_text(tmp_path, AnGPT)
    text = "the naïve cat\n  sat – ☕"
    tokens = load_tokenizer(tmp_path / "data" / "tokenizer.json").encode(text).ids

    out = export_to_transformers(run, tmp_path / "out")

    generation = read(out, trust=True).generation_config
    assert generation.eos_token_id == END
    assert generation.pad_token_id == END
    monkeypatch.setattr(dynamic_module_utils, "get_class_from_dynamic_module", refuse_code)
    monkeypatch.setattr("builtins.input", refuse_code)
    for trust in (None, False, True):
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=trust)
        assert tokenizer(text)["input_ids"] == tokens
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eos_token == END_OF_DOCUMENT
        assert tokenizer.eos_token_id == END
    refusal("lengths", out, "--output", tmp_path / "report")


def test_the_code_needs_torch_and_transformers_alone() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in CODE_FILES)

    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))

    standard_library = {"collections", "functools", "math", "typing"}
    assert imported <= {"torch", "transformers"} | standard_library


WITHOUT_A_FORM = [
    ("positions", DynamicNTK()),
    ("attention", LogNWithSlopes()),
]


@pytest.mark.parametrize(("name", "value"), WITHOUT_A_FORM)
def test_a_setting_for_which_the_code_has_no_form_is_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    model = loud(GPT, **{name: value})
    sentence = f"--format huggingface cannot hold {name} {type(value).__name__}"

    with pytest.raises(UserError, match=sentence):
        write(model, tmp_path / "out")

    assert not (tmp_path / "out").exists()


EXPORTED = [GPT, NGPT, AnGPT]
REFUSED = {"s_qk"}
"""Settings of the models that no code for transformers supports."""
TRANSLATED = CONFIG_SETTINGS | CUSTOM_CODE_SETTINGS | SETTINGS_IN_WEIGHTS | TRAINING_SETTINGS


def setting_names(architecture: Any) -> set[str]:
    return {name for name, _, _ in settings_with_defaults(architecture, {})}


@pytest.mark.parametrize("architecture", EXPORTED)
def test_every_setting_of_a_model_is_translated_or_refused(architecture: Any) -> None:
    names = setting_names(architecture)

    assert "qk_norm" in names
    assert names - TRANSLATED <= REFUSED


def test_no_table_of_settings_names_a_setting_that_is_gone() -> None:
    names = set().union(*map(setting_names, EXPORTED))

    assert names >= TRANSLATED


@pytest.mark.parametrize("kind", [*MECHANISMS, *POSITIONS])
def test_every_argument_of_mechanisms_and_positions_is_translated(kind: type) -> None:
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
