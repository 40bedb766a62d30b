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
from anlit.explore.guard import MOST_BYTES, Guard
from anlit.explore.session import Session, Stopped, distinct_names, find_runs
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

    assert main(["generate", runs[1], "the cat", "--max_tokens", "10", "--temperature", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    session = Session(runs, "cpu")
    view = session.look(next(name for name in session.paths if name.startswith("angpt")), "the cat", 10, GREEDY)
    assert view.losses[1] == pytest.approx(-np.mean(found["log_likelihood"]), rel=1e-4)
    assert "".join(piece.text for piece in view.continuation).rstrip("�") == found["text"].rstrip("�")


def test_a_prompt_has_a_bound(runs: list[str]) -> None:
    session = Session(runs[:1], "cpu", most_tokens=20)
    (name,) = session.paths
    assert session.look(name, "the cat", 5, GREEDY).n_tokens[0] <= 15
    with pytest.raises(UserError, match=r"and 30 tokens to come are more than the 20 tokens of this page"):
        session.look(name, "the cat", 30, GREEDY)
    with pytest.raises(UserError, match=r"a prompt of 1,400,000 characters .* shorten the prompt"):
        session.look(name, "the cat" * 200_000, 5, GREEDY)


def test_a_continuation_can_be_stopped(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(runs[:1], "cpu")
    (name,) = session.paths
    told: list[int] = []

    def stop_at_third(draw):
        def wrapped(*arguments):
            told.append(1)
            if len(told) == 3:
                session.stop()
            return draw(*arguments)

        return wrapped

    monkeypatch.setattr(Sampling, "draw", stop_at_third(Sampling.draw))
    with pytest.raises(Stopped):
        session.look(name, "the", 1000, Sampling(temperature=1))
    assert len(told) == 3
    with pytest.raises(Stopped):  # what waits in line stops too
        session.look(name, "the", 1, GREEDY)
    session.begin()
    assert session.look(name, "the", 0, GREEDY).n_tokens[0] >= 1


def request(host: str, path: str = "/", method: str = "GET", **headers: str) -> dict:
    named = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    encoded = [(name.encode(), value.encode()) for name, value in named.items()]
    return {"type": "http", "method": method, "path": path, "headers": encoded}


@pytest.mark.parametrize(
    ("served", "host", "answered"),
    [
        ("127.0.0.1", "127.0.0.1:7860", True),
        ("127.0.0.1", "LOCALHOST:7860", True),
        ("127.0.0.1", "[::1]:7860", True),
        ("127.0.0.1", "evil.example:7860", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "192.168.1.7", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[::1", False),
        ("0.0.0.0", "192.168.1.7:7860", True),
        ("0.0.0.0", "evil.example", False),
        ("lab.example", "lab.example:80", True),
    ],
)
def test_only_names_of_this_machine_are_answered(served: str, host: str, answered: bool) -> None:
    assert (Guard(None, served).refusal(request(host)) is None) == answered


@pytest.mark.parametrize(
    ("path", "method", "size", "status"),
    [
        ("/gradio_api/upload", "POST", "10", 403),
        ("/upload/", "POST", "10", 403),
        ("/gradio_api/upload_progress", "GET", "", 403),
        ("/gradio_api/queue/join", "POST", "", 411),
        ("/gradio_api/queue/join", "POST", str(MOST_BYTES + 1), 413),
        ("/gradio_api/queue/join", "POST", "10", None),
        ("/gradio_api/queue/data", "GET", "", None),
    ],
)
def test_files_and_large_requests_are_refused(path: str, method: str, size: str, status: int | None) -> None:
    found = Guard(None, "127.0.0.1").refusal(request("localhost", path, method, content_length=size))
    assert (found and found[0]) == status


@pytest.mark.skipif(not HAS_GRADIO, reason="needs gradio")
def test_the_server_stands_behind_the_guard_and_can_be_stopped(runs: list[str]) -> None:
    import http.client
    import socket

    from anlit.explore import page

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    session = Session(runs[:1], "cpu")
    served = page.launch(session, [], "127.0.0.1", port)

    def status(method: str, path: str, host: str, body: bytes | None = None, kind: str = "application/json") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, body, {"Host": host, "Content-Type": kind})
        return connection.getresponse().status

    file = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
    try:
        assert status("GET", "/config", f"127.0.0.1:{port}") == 200
        assert status("GET", "/config", "evil.example") == 421
        assert status("POST", "/gradio_api/upload", f"127.0.0.1:{port}", file, "multipart/form-data; boundary=x") == 403
        assert status("POST", "/gradio_api/run/stop", f"127.0.0.1:{port}", b'{"data": []}') == 200
        with pytest.raises(Stopped):
            session.look(next(iter(session.paths)), "the", 1, GREEDY)
    finally:
        served.close()


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
        (["--most_tokens", "0"], "--most_tokens must be at least 1, not 0"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence: str, capsys) -> None:
    assert main(["explore", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(HAS_GRADIO, reason="gradio is installed")
def test_without_gradio_the_error_names_the_extra(runs: list[str], capsys) -> None:
    assert main(["explore", runs[0]]) == 2
    assert "anlit explore needs gradio: run `make extras EXTRAS=explore`" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_GRADIO, reason="needs gradio")
def test_the_page_continues_prompts_and_tells_mistakes(runs: list[str]) -> None:
    import gradio as gr

    from anlit.explore import page

    session = Session(runs, "cpu")
    names = list(session.paths)
    built = page.build(session, names[:1])
    look = next(function.fn for function in built.fns.values() if function.api_name == "look")
    views = look(names, "the cat", 5, 0.8, 0, 0.95, 0)
    assert [view.name for view in views] == names
    for arguments, sentence in ((([], "the"), "no model is chosen"), ((names, ""), "the prompt is empty")):
        with pytest.raises(gr.Error, match=sentence):
            look(*arguments, 5, 0.8, 0, 0.95, 0)
