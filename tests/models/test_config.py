"""The settings of the models: each declared once, each a documented key of the command line, all saved."""

from dataclasses import fields
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from anlit import GPT
from anlit.errors import UserError
from anlit.models.angpt import AnGPTConfig
from anlit.models.config import DecoderConfig
from anlit.models.gpt import GPTConfig
from anlit.models.language_model import LanguageModel
from anlit.models.ngpt import NGPTConfig
from anlit.settings import to_plain_values
from tests.models.tiny import tiny

CONFIGS = {"GPT": GPTConfig, "NGPT": NGPTConfig, "AnGPT": AnGPTConfig}
each = pytest.mark.parametrize("name", CONFIGS)


@each
def test_every_setting_is_a_documented_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LanguageModel, "model")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--model.help=anlit.{name}"])
    shown = capsys.readouterr().out.split("Help for")[1]
    for setting in ("optimizer", "schedule", *(field.name for field in fields(CONFIGS[name]))):
        key = f"--model.{setting}"
        assert key in shown, key
        if setting in ("schedule", "runtime", "approximation"):  # a group, whose entries say what they are
            continue
        about = shown.split(f"{key} ", 1)[1].split("(type:", 1)[0].split()
        assert len(about) > 3, f"{key} says nothing: {about}"


@each
def test_a_shared_setting_is_declared_in_one_place(name: str) -> None:
    assert not DecoderConfig.__annotations__.keys() & CONFIGS[name].__annotations__.keys()


@each
def test_a_model_built_in_python_saves_the_settings_that_were_not_given_too(name: str) -> None:
    model: Any = tiny(getattr(__import__("anlit"), name), post_norm=True)
    saved = to_plain_values(dict(model.hparams))
    assert saved.keys() >= {field.name for field in fields(CONFIGS[name])}
    assert saved["post_norm"] is True
    assert saved["qk_norm"] is True
    assert saved["attention"] == {"class_path": "anlit.attention.mechanisms.plain.Plain", "init_args": {}}


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match=r"model\.d_model=30 is not divisible by model\.n_heads=4.*or set d_head"):
        GPT(vocab_size=8, d_model=30, n_heads=4)
    assert GPT(vocab_size=8, n_layers=1, d_model=30, n_heads=4, d_head=8).model.blocks[0].W_o.weight.shape == (30, 32)


@pytest.mark.parametrize("n_kv_heads", [0, 3, 8])
def test_heads_of_keys_must_divide_those_of_queries(n_kv_heads: int) -> None:
    with pytest.raises(UserError, match=rf"model\.n_kv_heads={n_kv_heads} does not divide model\.n_heads=4"):
        GPT(vocab_size=8, d_model=32, n_heads=4, n_kv_heads=n_kv_heads)


@pytest.mark.parametrize("name", ["NGPT", "AnGPT"])
def test_a_tied_head_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=r"tie_embeddings is for GPT\+ only, because the h of nGPT and anGPT begins"):
        tiny(getattr(__import__("anlit"), name), tie_embeddings=True)
