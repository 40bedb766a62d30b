"""The settings of the models: each a documented key of the command line, all saved, refused where they cannot work."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from anlit import GPT, NGPT, AnGPT, DynamicNTK, PRoPE, RoPE, YaRN
from anlit.cli import main
from anlit.errors import UserError
from anlit.models.angpt import AnGPTConfig
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
def test_a_model_built_in_python_saves_the_settings_that_were_not_given_too(name: str) -> None:
    model: Any = tiny(getattr(__import__("anlit"), name), post_norm=True)
    saved = to_plain_values(dict(model.hparams))
    assert saved.keys() >= {field.name for field in fields(CONFIGS[name])}
    assert saved["post_norm"] is True
    assert saved["qk_norm"] is True
    assert saved["attention"] == {"class_path": "anlit.attention.mechanisms.plain.Plain", "init_args": {}}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


@each
def test_default_parts_are_written_as_classes_and_read_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = printed(capsys, f"--model={name}", "--data=PythonSources")
    settings = config["model"]["init_args"]
    assert settings["attention"]["class_path"] == "anlit.Plain"
    assert settings["positions"] == {"class_path": "anlit.RoPE", "init_args": {"fraction": 0.5, "base": 10000.0}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert printed(capsys, f"--config={tmp_path}/config.yaml") == config


YARN = {"factor": 4.0, "training_length": 8, "fraction": 1.0}
TIED = r"tie_embeddings is for GPT\+ only, because the h of nGPT and anGPT begins"
REFUSED: list[tuple[type[LanguageModel], dict[str, Any], str]] = [
    (GPT, {"d_model": 30, "n_heads": 4},
     r"model\.d_model=30 is not divisible by model\.n_heads=4.*or set d_head"),
    *((GPT, {"n_heads": 4, "n_kv_heads": n}, rf"model\.n_kv_heads={n} does not divide model\.n_heads=4")
      for n in (0, 3, 8)),
    (NGPT, {"tie_embeddings": True}, TIED),
    (AnGPT, {"tie_embeddings": True}, TIED),
    (AnGPT, {"silu_std": 0.0}, "model.silu_std=0.0 must be a positive number"),
    (AnGPT, {"qk_clip": 30.0}, "model.qk_clip has nothing to shrink in an AnGPT with QK-norm"),
    (GPT, {"qk_clip": 30.0, "qk_norm_gain": False},
     "model.qk_clip has nothing to shrink where QK-norm has no gain"),
    (NGPT, {"qk_clip": 30.0, "qk_norm_gain": False}, "model.qk_clip shrinks nGPT's s_qk"),
    (GPT, {"d_head": 4, "positions": DynamicNTK()}, r"DynamicNTK .*fraction=0\.5 of d_head=4 rotates one pair"),
    (GPT, {"d_head": 6, "positions": RoPE(0.5)},
     r"positions\.fraction=0\.5 of d_head=6 rotates 3 dimensions.*even.*fraction or d_head"),
    *((GPT, {"d_head": width, "positions": PRoPE()}, rf"PRoPE.*d_model/n_heads.*multiple of 4.*not {width}")
      for width in (4, 10)),
    (NGPT, {"positions": YaRN(**YARN)},
     r"attention_factor=1\.13863 has no effect .* nGPT.*: set attention_factor: 1, or"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "settings", "sentence"), REFUSED)
def test_a_setting_that_cannot_work_is_refused_with_the_fix(architecture, settings, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        tiny(architecture, **settings)


@pytest.mark.parametrize(("architecture", "settings"), [
    (GPT, {"d_model": 30, "n_heads": 4, "d_head": 8}),
    (NGPT, {"positions": YaRN(**YARN, attention_factor=1.0)}),
    (NGPT, {"positions": YaRN(**YARN), "qk_norm": False}),
])  # fmt: skip
def test_the_fix_is_accepted(architecture, settings) -> None:
    assert tiny(architecture, **settings).model.n_parameters() > 0
