"""What the page shows is what the other commands say; the page itself is built where Gradio is installed."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from anlit import GPT, AnGPT, SlidingWindow
from anlit.cli import main
from anlit.errors import UserError
from anlit.evaluation.diagnose.plot import TITLES, head_maps
from anlit.inference.explore.session import Session, distinct_names, find_runs
from anlit.inference.sampling import Sampling
from tests.inference.with_text import make_run_with_text

GREEDY = Sampling(temperature=0)
HAS_GRADIO = importlib.util.find_spec("gradio") is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    gpt = make_run_with_text(folder / "gpt", GPT)
    return [str(gpt), str(make_run_with_text(folder / "angpt", AnGPT, n_layers=3, attention=SlidingWindow(4)))]


def test_a_view_has_the_whole_text_and_its_losses(runs: list[str]) -> None:
    session = Session(runs, "cpu")
    for name in session.paths:
        view = session.look(name, "the café ☕", 20, GREEDY)
        assert "".join(piece.text for piece in view.prompt) == "the café ☕"
        n_layers = 3 if name.startswith("angpt") else 1
        assert view.attention.keys() >= TITLES.keys()
        assert view.attention["entropy"].shape == (n_layers, 2)
        again = session.look(name, "the café ☕", 0, GREEDY)
        assert (again.continuation, again.n_tokens[1], math.isnan(again.losses[1])) == ([], 0, True)
        assert again.losses[0] == pytest.approx(view.losses[0], rel=1e-5)
        assert again.prompt == [(piece.text, pytest.approx(piece.loss, rel=1e-4)) for piece in view.prompt]
        assert view.ended == (view.n_tokens[1] < 20)


def test_greedy_continuations_have_the_losses_that_generation_saw(runs: list[str], capsys) -> None:
    import json

    assert main(["generate", runs[1], "the cat", "--max-tokens", "10", "--temperature", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    session = Session(runs, "cpu")
    view = session.look(next(name for name in session.paths if name.startswith("angpt")), "the cat", 10, GREEDY)
    assert view.losses[1] == pytest.approx(-np.mean(found["log_likelihood"]), rel=1e-4)
    assert "".join(piece.text for piece in view.continuation).rstrip("�") == found["text"].rstrip("�")


def test_names_are_as_short_as_they_can_be() -> None:
    assert distinct_names(["runs/a", "runs/b"]) == ["a", "b"]
    assert distinct_names(["x/run", "y/run"]) == ["x/run", "y/run"]
    with pytest.raises(UserError, match="runs/a is named twice"):
        distinct_names(["runs/a", "runs/a"])


def test_run_folders_are_found(runs: list[str], tmp_path: Path) -> None:
    folder = Path(runs[0]).parents[1]
    assert find_runs(str(folder)) == sorted(runs)
    assert find_runs(str(tmp_path)) == []


def test_head_maps_share_one_scale() -> None:
    figure = head_maps({"a": np.array([[0.0, 1.0]]), "b": np.array([[4.0, 2.0], [1.0, 3.0]])}, "entropy")
    images = [axes.images[0] for axes in figure.axes[:2]]
    assert [(image.norm.vmin, image.norm.vmax) for image in images] == [(0, 4), (0, 4)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--runs", "nowhere"], "there is no model to show: name checkpoints"),
        (["missing.ckpt"], "missing.ckpt does not exist"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence: str, capsys) -> None:
    assert main(["explore", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(HAS_GRADIO, reason="gradio is installed")
def test_without_gradio_the_error_names_the_extra(runs: list[str], capsys) -> None:
    assert main(["explore", runs[0]]) == 2
    assert 'anlit explore needs gradio: pip install "anlit[explore]"' in capsys.readouterr().err


@pytest.mark.skipif(not HAS_GRADIO, reason="needs gradio")
def test_the_page_continues_prompts_and_tells_mistakes(runs: list[str]) -> None:
    import gradio as gr

    from anlit.inference.explore import page

    session = Session(runs, "cpu")
    names = list(session.paths)
    built = page.build(session, names[:1])
    look = next(function.fn for function in built.fns.values() if function.api_name == "look")
    views = look(names, "the cat", 5, 0.8, 0, 0.95, 0)
    assert [view.name for view in views] == names
    for arguments, sentence in ((([], "the"), "no model is chosen"), ((names, ""), "the prompt is empty")):
        with pytest.raises(gr.Error, match=sentence):
            look(*arguments, 5, 0.8, 0, 0.95, 0)
