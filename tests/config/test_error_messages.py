"""Sentences for errors that no command of `mistakes.py` causes."""

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from anlit.config.error_messages import explain_parser_error
from anlit.config.lightning_errors import explain_lightning_error, is_lightning_error


@pytest.mark.parametrize(
    "message",
    [
        'Parser key "trainer": ',
        'Parser key "trainer":\n    Given value: 3',
        "Parser key \"trainer\":\n    - Expected a <class 'NoneType'>. Got value: 3",
    ],
)
def test_an_error_without_a_cause_is_a_sentence_too(message: str) -> None:
    sentence = explain_parser_error(message, [], "anlit fit")

    assert sentence == "trainer: the value is wrong: anlit fit --help lists the options"


def test_an_error_of_torch_is_none_of_lightnings() -> None:
    error = RuntimeError("the operator needs NVLink, which is not available")

    assert not is_lightning_error(error)


@pytest.mark.parametrize(
    ("accelerator", "advice"),
    [("cpu", "give --trainer.devices 1 or more on CPU"), ("cuda", "or -1 for all devices")],
)
def test_no_devices_are_refused_with_advice_for_the_machine(accelerator: str, advice: str) -> None:
    error = MisconfigurationException(
        f"`Trainer(devices='0')` value is not a valid input using {accelerator} accelerator."
    )

    assert explain_lightning_error(error).endswith(advice)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("val_loss", "did you mean val/loss?"), ("bleu", "give one of val/loss, e")],
)
def test_a_metric_that_nobody_logs(name: str, advice: str) -> None:
    error = MisconfigurationException(
        f"`ModelCheckpoint(monitor='{name}')` could not find the monitored key in the returned "
        f"metrics: ['val/loss', 'epoch']. HINT: Did you call `log('{name}', value)`?"
    )

    sentence = explain_lightning_error(error)

    assert sentence.startswith(f"a callback monitors {name}, which is not logged: {advice}")


@pytest.mark.parametrize(
    "message",
    [
        "Early stopping conditioned on metric `bleu` which is not available. Pass in or modify "
        "your `EarlyStopping` callback to use any of the following: `val/loss`, `epoch`",
        "ReduceLROnPlateau conditioned on metric bleu which is not available. Available metrics "
        "are: ['val/loss', 'epoch']. Condition can be set using `monitor` key in lr scheduler dict",
    ],
)
def test_words_of_lightning_are_no_metrics(message: str) -> None:
    sentence = explain_lightning_error(RuntimeError(message))

    fix = "give one of val/loss, epoch"
    assert sentence == f"a callback monitors bleu, which is not logged: {fix}"


def test_a_class_of_the_main_module_is_refused_in_a_sentence(monkeypatch) -> None:
    """The script `anlit` has no `__spec__`, for which find_spec raises ValueError."""
    monkeypatch.setattr("__main__.__spec__", None)
    message = 'Parser key "model": Import path not found. Got value: __main__.Mine'

    sentence = explain_parser_error(message, [], "anlit fit")

    assert sentence.startswith("model")
