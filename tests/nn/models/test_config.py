"""The settings of the models: documented keys, saved, refused if they cannot work."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from jsonargparse import ArgumentParser

import anlit
from anlit import GPT, NGPT, AdamW, AnGPT, DynamicNTK, MuonAdamW, PRoPE, Runtime, YaRN
from anlit.config.error_messages import class_choices
from anlit.config.files import FOLDER
from anlit.config.objects import parameters_of, to_plain_values
from anlit.config.registry import public_classes
from anlit.errors import UserError
from anlit.nn.models.angpt import AnGPTConfig, Approximation
from anlit.nn.models.gpt import GPTConfig
from anlit.nn.models.ngpt import NGPTConfig
from anlit.training import models as architectures
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups
from anlit.training.optim.schedule import WSD, Cosine
from tests.nn.models.tiny import SIZE, tiny

models = pytest.mark.parametrize(
    ("model", "config"), [(GPT, GPTConfig), (NGPT, NGPTConfig), (AnGPT, AnGPTConfig)]
)


def test_a_class_of_the_models_file_is_offered_under_its_name(monkeypatch) -> None:
    class Ours(GPT):
        """A new architecture."""

    monkeypatch.setattr(architectures, "Ours", Ours, raising=False)
    monkeypatch.setattr(architectures, "__all__", [*architectures.__all__, "Ours"])

    assert anlit.Ours is Ours
    assert class_choices("model").endswith(" or Ours")


def test_every_architecture_has_a_fragment() -> None:
    class_paths = set()
    for file in (FOLDER / "model").glob("*.yaml"):
        class_paths.add(yaml.safe_load(file.read_text())["model"]["class_path"])

    assert class_paths == {f"anlit.{name}" for name in public_classes("anlit.training.models")}


@models
def test_every_setting_is_a_documented_key(
    model, config, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LanguageModel, "model")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--model.help=anlit.{model.__name__}"])
    shown = capsys.readouterr().out.split("Help for")[1]
    for setting in ("optimizer", "schedule", *(field.name for field in fields(config))):
        key = f"--model.{setting}"
        assert key in shown, key
        is_group = setting in ("schedule", "runtime", "approximation")
        if is_group:  # its entries are described instead
            continue
        entry = shown.split(f"{key} ", 1)[1]
        description = entry.split("(type:", 1)[0]
        assert len(description.split()) > 3, f"{key} says nothing: {description}"


@models
def test_a_model_built_in_python_saves_the_settings_that_were_not_given_too(model, config) -> None:
    saved = to_plain_values(dict(tiny(model, post_norm=True).hparams))
    assert saved.keys() >= {field.name for field in fields(config)}
    assert saved["post_norm"] is saved["qk_norm"] is True
    assert saved["attention"] == {
        "class_path": "anlit.nn.mechanisms.plain.Plain",
        "init_args": {},
    }


def test_default_parts_are_written_as_classes_and_read_again(
    tmp_path: Path, printed_config
) -> None:
    config = printed_config("--model=AnGPT", "--data=PythonSources")
    settings = config["model"]["init_args"]
    assert settings["attention"]["class_path"] == "anlit.Plain"
    assert settings["positions"] == {
        "class_path": "anlit.RoPE",
        "init_args": {"fraction": 0.5, "base": 10000.0},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert printed_config(f"--config={tmp_path}/config.yaml") == config


YARN = {"factor": 4.0, "training_length": 8, "fraction": 1.0}


@pytest.mark.parametrize(
    ("architectures", "settings", "sentence"),
    [
        ([GPT], {"n_heads": 4, "n_kv_heads": 3}, r"n_kv_heads=3 does not divide model\.n_heads=4"),
        ([GPT, NGPT, AnGPT], {"attention_gate": "x"}, r"attention_gate=x is not known: choose"),
        (
            [GPT, NGPT, AnGPT],
            {"qk_clip": 9.0, "qk_norm_gain": False},
            r"qk_clip has .*: set model\.qk_norm_gain: true",
        ),
        (
            [NGPT, AnGPT],
            {"tie_embeddings": True},
            r"tie_embeddings is for GPT\+ only, because the h of nGPT and anGPT",
        ),
        (
            [GPT],
            {"d_head": 4, "positions": DynamicNTK()},
            r"fraction=0\.5 of d_head=4 rotates 2 .*even .* at least 4",
        ),
        *(
            (
                [GPT],
                {"d_head": d, "positions": PRoPE()},
                rf"PRoPE.*multiple of 4 and at least 8, not {d}",
            )
            for d in (4, 10)
        ),
        ([GPT], {"vocab_size": None}, "vocab_size is not given"),
        (
            [GPT, AnGPT],
            {"norm_eps": math.nan},
            "norm_eps=nan is out of range: give a finite number, 0 or more",
        ),
        ([NGPT, AnGPT], {"s_z_scale": 0}, "s_z_scale=0 is out of range: give more than 0"),
        (
            [NGPT],
            {"positions": YaRN(**YARN)},
            r"attention_factor=1\.13863, .* cancels: set positions\.attention_factor: 1",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_the_fix(
    architectures, settings, sentence
) -> None:
    for architecture in architectures:
        with pytest.raises(UserError, match=sentence):
            tiny(architecture, **settings)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model", GPTConfig),
        ("model", NGPTConfig),
        ("model", AnGPTConfig),
        ("model.runtime", Runtime),
        ("model.approximation", Approximation),
        ("model.schedule", Cosine),
        ("model.schedule", WSD),
        ("model.optimizer", AdamW),
        ("model.optimizer", MuonAdamW),
    ],
)
def test_every_number_has_a_range_that_its_constructor_checks(key, kind) -> None:
    for parameter in parameters_of(kind):
        name = parameter.name
        is_number = {int, float} & {parameter.annotation, *get_args(parameter.annotation)}
        if not is_number:
            continue
        setting: dict[str, Any] = {name: (0.9, -1) if name == "betas" else -1}
        message = rf"^{key}\.{name}(\.1)?=-1 is out of range: give .*[01]"
        with pytest.raises(UserError, match=message):
            make(kind, **setting)


def make(kind: Any, **setting: Any) -> None:
    """Make a `kind` with this setting and all that it needs."""
    if kind in (AdamW, MuonAdamW):
        kind(parameter_groups(tiny(GPT).model), **setting)
    elif kind is Runtime:
        AnGPTConfig(**SIZE, runtime=Runtime(**setting))
    elif kind is Approximation:
        AnGPTConfig(**SIZE, approximation=Approximation(**setting))
    elif kind in (Cosine, WSD):
        kind(**setting)
    else:
        kind(**{**SIZE, **setting})


def test_the_fix_is_accepted() -> None:
    tiny(NGPT, positions=YaRN(**YARN, attention_factor=1.0))
    tiny(NGPT, positions=YaRN(**YARN), qk_norm=False)
