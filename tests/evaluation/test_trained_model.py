"""`anlit.load_checkpoint` in Python: the same text and scores as the commands give."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import anlit
from anlit.cli import main
from anlit.errors import UserError
from anlit.evaluation.trained_model import TrainedModel

SETTINGS = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def model(run_with_text: Path) -> TrainedModel:
    return anlit.load_checkpoint(str(run_with_text), "cpu")


def test_it_draws_what_the_command_draws(model, run_with_text, capsys) -> None:
    options = [f"--{name}={value}" for name, value in SETTINGS.items()]
    command = [
        "generate",
        str(run_with_text),
        "the cat",
        "--max_tokens=12",
        "--device=cpu",
        "--json",
    ]
    assert main([*command, *options]) == 0
    record = json.loads(capsys.readouterr().out)

    assert model.generate("the cat", 12, **SETTINGS) == record["text"]


def test_its_loss_is_the_mean_of_its_scores(model) -> None:
    text = "the cat sat on the mat and the dog sat by the cat"

    scores = model.score(text)

    loss = model.loss(text)
    mean_score = np.nanmean(scores.log_likelihood)
    assert len(scores.tokens) == len(model.tokenizer.encode(text))
    assert loss == pytest.approx(-mean_score)
    assert 0 < loss < 2 * math.log(model.model.vocab_size)


def test_an_empty_text_is_one_sentence(model) -> None:
    with pytest.raises(UserError, match="no tokens of the text: give a longer text"):
        model.loss("")


def test_a_number_out_of_its_range_is_one_sentence(model) -> None:
    with pytest.raises(UserError, match="temperature -1 must be 0"):
        model.generate("the cat", temperature=-1.0)


def test_a_model_without_a_chat_template_is_one_sentence(model) -> None:
    with pytest.raises(UserError, match="chat template"):
        model.chat([{"role": "user", "content": "Hello"}])
