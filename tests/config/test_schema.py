"""Every setting of a run has a row in the schema. Every row is a setting of a run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from lightning.pytorch import callbacks

from anlit.cli import main
from anlit.config.objects import parameters_of
from anlit.config.registry import public_classes
from anlit.config.schema import (
    CORPUS,
    EXECUTION,
    MODEL,
    PATHS,
    SETTINGS,
    changes_measure,
    recorded_keys,
    row_of,
    schema_key,
    setting_of,
)
from anlit.runs.callbacks import OBSERVERS, changes_learning

MODELS = list(map("anlit.{}".format, public_classes("anlit.training.models")))
SHARDS = "--data.path=shards"
DATA = {
    **{f"anlit.{name}": [SHARDS] for name in public_classes("anlit.data.corpora")},
    "anlit.TokenShards": [SHARDS],
    "anlit.NeedleInHaystack": [SHARDS],
    "anlit.TextFiles": [SHARDS, "--data.source=texts"],
    "anlit.TokenData": [
        "--data.train=tests.integration.users_data.Rows",
        "--data.val=tests.integration.users_data.Rows",
        "--data.test=tests.integration.users_data.Rows",
    ],
    "anlit.Mixture": ["--data.paths={a: shards/a, b: shards/b}", "--data.weights={a: 1, b: 2}"],
}
"""Class of data → its options."""
ROOMS = {
    "model.attention": "anlit.nn.mechanisms",
    "model.positions": "anlit.nn.layers.positions",
    "model.optimizer": "anlit.training.optim.optimizers",
    "model.schedule": "anlit.training.optim.schedule",
    "trainer.callbacks": "anlit.training.callbacks",
}
"""Setting → the module that has its classes."""


@pytest.fixture
def printed_keys(capsys: pytest.CaptureFixture[str]) -> Callable[..., set[str]]:
    """printed_keys(*arguments) → the keys that a subcommand prints, as the schema has them."""

    def run(*arguments: str) -> set[str]:
        with pytest.raises(SystemExit):
            main([*arguments, "--print_config"])
        return set(keys_of(yaml.safe_load(capsys.readouterr().out)))

    return run


def keys_of(value: Any, key: str = "") -> Iterator[str]:
    """The keys of a configuration; the entries of a list have their numbers."""
    entries = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(entries, dict):
        yield schema_key(key)
        return
    for name, entry in entries.items():
        yield from keys_of(entry, f"{key}.{name}".lstrip("."))


def keys_of_classes() -> set[str]:
    """The keys of all classes of `ROOMS`."""
    keys = set()
    for setting, room in ROOMS.items():
        for kind in public_classes(room).values():
            for parameter in parameters_of(kind):
                keys.add(f"{setting}.{parameter.name}")
    return keys


def test_every_key_of_a_configuration_has_a_row_and_every_row_a_key(
    printed_keys: Callable[..., set[str]],
) -> None:
    keys = keys_of_classes() | printed_keys("validate", "--model=GPT", "--data=TokenShards", SHARDS)
    for number, (data, options) in enumerate(DATA.items()):
        model = MODELS[number % len(MODELS)]
        keys |= printed_keys("fit", f"--model={model}", f"--data={data}", *options)

    without_row = [key for key in keys if row_of(key) is None]
    rows = set(map(row_of, keys))
    without_key = [setting.key for setting in SETTINGS if setting not in rows]

    assert without_row == []
    assert without_key == []


def test_a_key_has_one_row() -> None:
    keys = set()
    for setting in SETTINGS:
        assert setting.key not in keys
        keys.add(setting.key)


@pytest.mark.parametrize(
    ("key", "row"),
    [
        pytest.param("model.init_args.optimizer.class_path", "model.optimizer", id="a class"),
        pytest.param("model.init_args.optimizer.init_args.lr", "model.optimizer.lr", id="exact"),
        pytest.param("model.optimizer.nesterov", "model.optimizer.*", id="torch's argument"),
        pytest.param("model.attention.layers.0.tau", "model.attention.*", id="deep in a pattern"),
        pytest.param("data.context_schedule.5000", "data.context_schedule.*", id="an entry"),
        pytest.param("model.init_args.backend", "model.kernel", id="an earlier name"),
    ],
)
def test_the_most_specific_row_covers_a_key(key: str, row: str) -> None:
    assert setting_of(key).key == row


def test_a_setting_of_a_users_class_has_the_row_of_its_section() -> None:
    model = setting_of("model.init_args.n_experts")
    data = setting_of("data.language")
    folder = setting_of("data.raw_dir")
    trainer = setting_of("trainer.turbo")

    assert (model.role, model.fixed, model.hidden) == (MODEL, True, False)
    assert (data.role, data.fixed) == (CORPUS, False)
    assert folder.role is PATHS
    assert (trainer.role, trainer.fixed) == (EXECUTION, False)


def test_what_a_loss_is_measured_on_may_not_change_within_a_run() -> None:
    measured = [setting.key for setting in SETTINGS if changes_measure(setting.key)]

    assert {*measured} < {*recorded_keys()}, "a checkpoint records it, so that a change is seen"
    assert measured == [
        "data.val_blocks",
        "data.val_tokens",
        "data.val_context_length",
        "data.val_samples",
        "data.score_first_token",
        "trainer.limit_val_batches",
    ]


@pytest.mark.parametrize("name", public_classes("anlit.training.callbacks"))
def test_a_callback_says_whether_it_changes_learning(name: str) -> None:
    """Reports read from the source the values of the class."""
    kind = public_classes("anlit.training.callbacks")[name]

    assert isinstance(vars(kind).get("changes_learning"), bool)
    assert changes_learning(f"anlit.training.callbacks.{name}") is kind.changes_learning


@pytest.mark.parametrize("path", OBSERVERS)
def test_observers_are_callbacks_of_lightning(path: str) -> None:
    kind = getattr(callbacks, path.removeprefix("lightning.pytorch.callbacks."))

    assert issubclass(kind, callbacks.Callback)
    assert not changes_learning(path)
    assert not changes_learning(f"{kind.__module__}.{kind.__name__}")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("lightning.pytorch.callbacks.EMAWeightAveraging", id="Lightning's"),
        pytest.param("mine.Timer", id="a user's of a known name"),
        pytest.param("anlit.training.callbacks.Removed", id="of an earlier commit"),
    ],
)
def test_other_callbacks_may_change_learning(path: str) -> None:
    assert changes_learning(path)
