"""The hub: listing, fetching with interruptions, and refusals in one sentence."""

import hashlib
import multiprocessing
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from anlit.data.preparation import hub_requests
from anlit.data.preparation.files import SourceFile
from anlit.data.preparation.hub import HubFiles, fetch_tokenizer, matches
from anlit.errors import UserError
from tests.data.hub_server import HubServer, alone_with, hub

REPO = "owner/corpus"
BIG = "train/chunk1/example_1.jsonl.zst"
CONTENT = bytes(range(256)) * 12_000  # 3 MB, three pieces of a download


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    root = tmp_path / "hub" / "datasets" / REPO
    for name, content in {
        "README.md": b"read me",
        BIG: CONTENT,
        "train/chunk1/example_0.jsonl.zst": b"zero",
        "train/chunk2/deep/er/example_2.jsonl.zst": b"two",
        "train/chunk2/example_2.txt": b"another kind",
        "test/example_3 größe.jsonl.zst": b"three",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    alone_with(monkeypatch, tmp_path)
    with hub(tmp_path / "hub") as running:
        yield running
    close_session()


def corpus(server: HubServer, *patterns: str, revision: str = "main") -> HubFiles:
    return HubFiles(REPO, revision, patterns or ("**",), server.endpoint)


def fetch(source: HubFiles, name: str, folder: Path, size: Any = None, sha256: str | None = None) -> Path:
    return source.provide(SourceFile(name, size, sha256), folder)


def test_files_of_the_wanted_kind_with_sizes_and_hashes(server: HubServer) -> None:
    source = corpus(server, "train/chunk*/**.jsonl.zst", "test/*.jsonl.zst")
    files = source.listing().files
    assert [file.name for file in files] == [
        "test/example_3 größe.jsonl.zst",
        "train/chunk1/example_0.jsonl.zst",
        BIG,
        "train/chunk2/deep/er/example_2.jsonl.zst",
    ]
    assert files[2] == SourceFile(BIG, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert [file.name for file in corpus(server, "train/chunk2/*", "README.md").listing().files] == [
        "README.md",
        "train/chunk2/example_2.txt",
    ]
    (readme,) = corpus(server, "*.md").listing().files
    assert readme == SourceFile("README.md", 7, None)


def test_only_the_folders_of_the_patterns_are_listed(server: HubServer) -> None:
    corpus(server, "train/chunk2/deep/**").listing()
    trees = [path for path, _ in server.asked if "/tree/" in path]
    assert trees
    assert all("/train%2Fchunk2%2Fdeep?" in path for path in trees)


def test_patterns() -> None:
    for name, pattern, expected in [
        ("a/b.x", "a/*.x", True),
        ("a/b/c.x", "a/*.x", False),
        ("a/b/c.x", "a/**.x", True),
        ("a/b.x", "a/**/*.x", True),
        ("a/b/c/d.x", "a/**/*.x", True),
        ("ab/b.x", "a/**/*.x", False),
        ("a/b.xx", "a/*.x", False),
        ("a/bax", "a/*.x", False),
        ("a/b1.x", "a/b?.x", True),
        ("a/b/.x", "a/b?.x", False),
    ]:
        assert matches(name, [pattern]) is expected, (name, pattern)


def test_a_branch_that_moves_is_read_at_the_commit_it_had(server: HubServer, tmp_path: Path) -> None:
    source = corpus(server, "*.md")
    before = server.commit
    source.listing()
    server.commit = "f" * 40
    assert source.commit == before
    with pytest.raises(UserError, match="no revision main of it"):
        fetch(source, "README.md", tmp_path / "to")
    assert corpus(server).commit == server.commit
    asked = len(server.asked)
    assert corpus(server, revision=before).commit == before
    assert len(server.asked) == asked


def test_fetching_puts_a_file_where_it_is_in_the_repository(server: HubServer, tmp_path: Path) -> None:
    source = pickle.loads(pickle.dumps(corpus(server, "test/*")))
    (file,) = source.listing().files
    path = fetch(source, file.name, tmp_path / "to", file.size, file.sha256)
    assert path == tmp_path / "to" / server.commit / "test" / "example_3 größe.jsonl.zst"
    assert path.read_bytes() == b"three"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    asked = len(server.asked)
    assert fetch(source, file.name, tmp_path / "to", file.size, file.sha256) == path
    assert len(server.asked) == asked


def test_a_dropped_connection_is_taken_up_again(server: HubServer, tmp_path: Path) -> None:
    server.drops = [500_000] * 5  # more often than an attempt without progress would be repeated
    source = corpus(server)
    (file,) = [file for file in source.listing().files if file.name == BIG]
    path = fetch(source, BIG, tmp_path, file.size, file.sha256)
    assert path.read_bytes() == CONTENT
    assert server.ranges() == [None, *(f"bytes={500_000 * number}-" for number in range(1, 6))]


def test_a_connection_that_stays_cut_is_given_up(server: HubServer, tmp_path: Path) -> None:
    source = corpus(server, revision=server.commit)
    server.drops = [500_000, 0, 0]
    assert fetch(source, BIG, tmp_path / "a", len(CONTENT)).read_bytes() == CONTENT
    server.drops = [500_000, 0, 0, 0]
    with pytest.raises(UserError, match=r"cannot be reached for the dataset owner/corpus \(.+\): check the network"):
        fetch(corpus(server, revision=server.commit), BIG, tmp_path / "b", len(CONTENT))
    assert fetch(source, BIG, tmp_path / "b", len(CONTENT)).read_bytes() == CONTENT
    assert server.ranges()[-1] == "bytes=500000-"


def test_a_killed_download_is_taken_up_again(server: HubServer, tmp_path: Path) -> None:
    server.drops, server.held = [1 << 20], threading.Event()
    source = corpus(server, revision=server.commit)
    partial = tmp_path / server.commit / f"{BIG}.incomplete"
    child = multiprocessing.get_context("fork").Process(target=fetch, args=(source, BIG, tmp_path, len(CONTENT)))
    child.start()
    try:
        deadline = time.monotonic() + 20
        while not (partial.is_file() and partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()
        server.held.set()
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / server.commit / BIG).exists()
    assert fetch(source, BIG, tmp_path, len(CONTENT)).read_bytes() == CONTENT
    first, second = server.ranges()
    assert first is None
    assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 1 << 20
    assert not partial.exists()


def test_a_server_that_sends_no_parts(server: HubServer, tmp_path: Path) -> None:
    server.parts, server.drops = False, [2 << 20]
    assert fetch(corpus(server), BIG, tmp_path, len(CONTENT)).read_bytes() == CONTENT
    assert len(server.ranges()) == 2


@pytest.mark.parametrize("left", [CONTENT + b"more", CONTENT])
@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_partial_file_as_long_as_the_file_or_longer(
    server: HubServer, tmp_path: Path, left: bytes, size: int | None
) -> None:
    partial = tmp_path / server.commit / f"{BIG}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(left)
    assert fetch(corpus(server), BIG, tmp_path, size).read_bytes() == CONTENT
    assert len(server.ranges()) == (0 if len(left) == size else 2)


def test_what_arrives_damaged_is_fetched_once_more(server: HubServer, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    source = corpus(server)
    server.damaged = 1
    assert fetch(source, BIG, tmp_path / "a", len(CONTENT), sha256).read_bytes() == CONTENT
    server.damaged = 2
    with pytest.raises(UserError, match=r"example_1.* of the dataset owner/corpus arrived damaged twice \(sha256 "):
        fetch(source, BIG, tmp_path / "b", len(CONTENT), sha256)
    with pytest.raises(UserError, match=r"twice \(3,072,000 bytes instead of 3,072,001\)"):
        fetch(source, BIG, tmp_path / "b", len(CONTENT) + 1)
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


def test_a_file_of_another_size_is_fetched_again(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / server.commit).mkdir()
    (tmp_path / server.commit / "README.md").write_bytes(b"read")
    assert fetch(corpus(server), "README.md", tmp_path, 7).read_bytes() == b"read me"


def test_a_token_goes_to_the_hub_and_not_to_where_it_sends_us(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(corpus(server), "README.md", tmp_path)
    assert set(server.authorized) == {("127.0.0.1", True), ("localhost", False)}


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            (401, "GatedRepo"),
            r"asks for consent before it gives the dataset owner/corpus: .*/datasets/owner/corpus and",
        ),
        ((403, None), r"refuses the dataset owner/corpus \(status 403\): log in with `hf auth login` or set HF_TOKEN"),
        ((401, None), r"refuses the dataset owner/corpus \(status 401\): log in"),
        ((401, "RepoNotFound"), r"has no dataset owner/corpus, or it is private: .*HF_TOKEN, or prepare from a local"),
        ((404, None), "has no dataset owner/corpus, or it is private"),
        ((404, "RevisionNotFound"), "no revision main of it: set --revision"),
        ((503, None), r"fails to give the dataset owner/corpus \(status 503\): try again later, or prepare"),
        ((429, None), r"fails to give the dataset owner/corpus \(status 429\)"),
    ],
)
def test_a_refusal_is_one_sentence(
    server: HubServer, tmp_path: Path, refusal: tuple[int, str | None], message: str
) -> None:
    server.refusal = refusal
    for request in (
        lambda: corpus(server).listing().files,
        lambda: fetch(corpus(server), "README.md", tmp_path),
    ):
        with pytest.raises(UserError, match=message) as caught:
            request()
        assert "\n" not in str(caught.value)
    attempts = {503: 2, 429: 4}.get(refusal[0], 1)
    assert len(server.asked) == 2 * attempts


def test_patience_grows_once_the_hub_has_answered(server: HubServer, tmp_path: Path) -> None:
    source = corpus(server)
    server.refusal, server.failing = (503, None), 2
    with pytest.raises(UserError, match="status 503"):
        source.listing()
    assert source.listing().files
    server.refusal, server.failing = (503, None), 3
    assert fetch(source, "README.md", tmp_path).read_bytes() == b"read me"
    server.refusal, server.failing = (503, None), 0
    with pytest.raises(UserError, match="status 503"):
        fetch(source, BIG, tmp_path)


def test_a_busy_hub_is_asked_again_after_the_time_it_names(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at first contact: several machines of one preparation begin together."""
    waited: list[float] = []
    monkeypatch.setattr(hub_requests.time, "sleep", waited.append)
    server.refusal, server.failing = (429, None), 3
    server.headers = {"Retry-After": "37"}
    assert corpus(server).listing().files
    assert waited == [37.0, 37.0, 37.0]
    waited.clear()
    server.refusal, server.failing, server.headers = (429, None), 1, {"Retry-After": "1000000000"}
    assert corpus(server).listing().files
    server.refusal, server.failing, server.headers = (429, None), 1, {"RateLimit": '"api";r=0;t=55'}
    assert corpus(server).listing().files
    server.refusal, server.failing, server.headers = (429, None), 1, {"Retry-After": "soon"}
    assert corpus(server).listing().files
    assert waited == [600.0, 55.0, 0.0]


def test_a_store_that_refuses_a_link_is_asked_by_a_fresh_one(server: HubServer, tmp_path: Path) -> None:
    """Its signature may have expired."""
    source = corpus(server)
    server.drops, server.store_refusals = [1 << 20], 2
    assert fetch(source, BIG, tmp_path / "a", len(CONTENT)).read_bytes() == CONTENT
    assert len([path for path, _ in server.asked if "/resolve/" in path]) == 4
    server.store_refusals = 4
    with pytest.raises(
        UserError, match=r"^The store of the dataset owner/corpus refuses the hub's links \(status 403\)"
    ):
        fetch(source, BIG, tmp_path / "b", len(CONTENT))


def test_what_does_not_exist(server: HubServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no dataset owner/other, or it is private"):
        HubFiles("owner/other", endpoint=server.endpoint).listing()
    with pytest.raises(
        UserError, match=r"no revision v2 of it: set --revision to one on http.*/datasets/owner/corpus\."
    ):
        corpus(server, revision="v2").listing()
    with pytest.raises(
        UserError, match=r"no file that matches data/\*\.x or b\.x in its revision main: set --revision"
    ):
        corpus(server, "data/*.x", "b.x").listing()
    with pytest.raises(UserError, match=r"has no file other\.txt in c0ffee0"):
        fetch(corpus(server), "other.txt", tmp_path)
    with pytest.raises(UserError, match='"a/b/c" is not the name of a dataset on the hub'):
        fetch(HubFiles("a/b/c", server.commit, endpoint=server.endpoint), "x", tmp_path)


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(hub_requests.time, "sleep", waited.append)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        source = HubFiles(REPO, endpoint=f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(
            UserError, match=r"cannot be reached for the dataset owner/corpus \(.+\): check the network"
        ):
            source.listing()
    assert waited == [1.0]
    with pytest.raises(UserError, match=r"cannot be reached .*unsupported protocol"):
        HubFiles(REPO, endpoint="ftp://127.0.0.1").listing()
    assert waited == [1.0]


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_requests, "FIRST_TIMEOUT", (0.05,) * 4)
    monkeypatch.setattr(hub_requests, "FIRST_WAITS", (0.0,))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = HubFiles(REPO, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=r"cannot be reached for the dataset owner/corpus \(timed out\)"):
            source.listing()


def test_something_else_answers(tmp_path: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.data.hub_server.json.dumps", lambda content: "<html>log in</html>")
    with pytest.raises(UserError, match="does not answer like the hub: check HF_ENDPOINT and proxies"):
        corpus(server).listing()


def test_offline_mode_says_so(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so the dataset owner/corpus is not fetched: unset it"):
        corpus(server).listing()
    assert server.asked == []


def test_a_tokenizer_is_fetched_once(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = server.folder / "models" / "openai-community" / "gpt2"
    model.mkdir(parents=True)
    with pytest.raises(UserError, match=r"The model openai-community/gpt2 has no file tokenizer\.json: give a local"):
        fetch_tokenizer("openai-community/gpt2", server.endpoint)
    (model / "tokenizer.json").write_text("{}")
    path = fetch_tokenizer("openai-community/gpt2", server.endpoint)
    assert path.read_text() == "{}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_tokenizer("openai-community/gpt2", server.endpoint) == path
    with pytest.raises(
        UserError, match=r"HF_HUB_OFFLINE is set, so the model .*give a local tokenizer\.json with --tok"
    ):
        fetch_tokenizer("EleutherAI/gpt-neox-20b", server.endpoint)


def test_a_tokenizer_in_the_cache_of_huggingface_hub_is_used(server: HubServer) -> None:
    repository = Path(constants.HF_HUB_CACHE) / "models--EleutherAI--gpt-neox-20b"
    cached = repository / "snapshots" / server.commit / "tokenizer.json"
    for path, content in ((repository / "refs" / "main", server.commit), (cached, "{}")):
        path.parent.mkdir(parents=True)
        path.write_text(content)
    assert fetch_tokenizer("EleutherAI/gpt-neox-20b", server.endpoint) == cached
    assert server.asked == []
