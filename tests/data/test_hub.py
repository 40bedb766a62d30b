"""The hub: listing, fetching with interruptions, and refusals in one sentence."""

import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from anlit.data.preparation import hub as hub_module
from anlit.data.preparation.hub import HubFiles, fetch_tokenizer
from anlit.data.preparation.sources import SourceFile
from anlit.errors import UserError
from tests.data.hub_server import HubServer, alone_with, sha256_of
from tests.data.preparing import wait_for

REPO = "owner/corpus"
BIG = "train/chunk1/example_10.jsonl.zst"
CONTENT = bytes(range(256)) * 12_000  # 3 MB, three pieces of a download


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    root = tmp_path / "hub" / "datasets" / REPO
    for name, content in {
        "README.md": b"read me",
        BIG: CONTENT,
        "train/chunk1/example_9.jsonl.zst": b"zero",
        "train/chunk2/deep/er/example_2.jsonl.zst": b"two",
        "train/chunk2/example_2.txt": b"another kind",
        "test/example_3 größe.jsonl.zst": b"three",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    with alone_with(monkeypatch, tmp_path / "hub", tmp_path) as running:
        yield running


@pytest.fixture
def source(server: HubServer) -> HubFiles:
    """With a known commit, as after the listing."""
    return HubFiles(REPO, server.commit)


@pytest.fixture
def big(server: HubServer) -> SourceFile:
    return SourceFile(BIG, len(CONTENT), sha256_of(server.folder / "datasets" / REPO / BIG))


def test_files_of_the_wanted_kind_with_sizes_and_hashes(server: HubServer, big: SourceFile) -> None:
    files = HubFiles(REPO, patterns=["train/**/*.jsonl.zst", "test/*.jsonl.zst", "nowhere/*.jsonl.zst"]).listing().files
    assert [file.name for file in files] == [
        "test/example_3 größe.jsonl.zst",
        "train/chunk1/example_9.jsonl.zst",
        BIG,
        "train/chunk2/deep/er/example_2.jsonl.zst",
    ]
    assert files[2] == big
    trees = [path.split("?")[0].rpartition("/")[2] for path, _ in server.asked if "/tree/" in path]
    assert set(trees) == {"train", "test", "nowhere"}  # no other folder is listed
    assert HubFiles(REPO, patterns=["*.md"]).listing().files == [SourceFile("README.md", 7, None)]
    with pytest.raises(UserError, match=r"no file that matches data/\*\.x in its revision main: set --revision"):
        HubFiles(REPO, patterns=["data/*.x"]).listing()


def test_a_branch_that_moves_is_read_at_the_commit_it_had(server: HubServer, tmp_path: Path) -> None:
    source = HubFiles(REPO)
    before = source.commit
    server.commit = "f" * 40
    assert source.commit == before
    with pytest.raises(UserError, match="no revision main of it"):
        source.provide(SourceFile("README.md", 7), tmp_path / "to")
    assert HubFiles(REPO).commit == server.commit
    asked = len(server.asked)
    assert HubFiles(REPO, before).commit == before
    assert len(server.asked) == asked


def test_a_dropped_connection_is_taken_up_again(
    server: HubServer, source: HubFiles, big: SourceFile, tmp_path: Path
) -> None:
    server.drops = [500_000]
    path = source.provide(big, tmp_path)
    assert path == tmp_path / server.commit / BIG
    assert path.read_bytes() == CONTENT
    assert server.ranges() == [None, "bytes=500000-"]
    assert source.provide(big, tmp_path) == path
    assert len(server.ranges()) == 2


def test_a_killed_download_is_taken_up_again(
    server: HubServer, source: HubFiles, big: SourceFile, tmp_path: Path
) -> None:
    server.drops, server.held = [1 << 20], threading.Event()
    partial = tmp_path / server.commit / f"{BIG}.incomplete"
    child = multiprocessing.get_context("fork").Process(target=source.provide, args=(big, tmp_path))
    child.start()
    try:
        wait_for(lambda: partial.is_file() and partial.stat().st_size)
    finally:
        child.kill()
        child.join()
        server.held.set()
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / server.commit / BIG).exists()
    begun = partial.stat().st_size
    assert source.provide(big, tmp_path).read_bytes() == CONTENT
    assert server.ranges() == [None, f"bytes={begun}-"]
    assert not partial.exists()


def test_a_server_that_sends_no_parts(server: HubServer, source: HubFiles, big: SourceFile, tmp_path: Path) -> None:
    server.parts, server.drops = False, [2 << 20]
    assert source.provide(big, tmp_path).read_bytes() == CONTENT
    assert len(server.ranges()) == 2


@pytest.mark.parametrize("left", [CONTENT + b"more", CONTENT])
def test_a_partial_file_as_long_as_the_file_or_longer(
    server: HubServer, source: HubFiles, big: SourceFile, tmp_path: Path, left: bytes
) -> None:
    partial = tmp_path / server.commit / f"{BIG}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(left)
    assert source.provide(big, tmp_path).read_bytes() == CONTENT
    assert server.ranges() == ([] if left == CONTENT else [None])


def test_what_arrives_damaged_is_fetched_once_more(
    server: HubServer, source: HubFiles, big: SourceFile, tmp_path: Path
) -> None:
    server.damaged = 1
    assert source.provide(big, tmp_path / "a").read_bytes() == CONTENT
    server.damaged = 2
    with pytest.raises(UserError, match=r"example_10.* of the dataset owner/corpus arrived damaged twice \(sha256 "):
        source.provide(big, tmp_path / "b")
    assert [path for path in (tmp_path / "b").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("refusal", "attempts", "message"),
    [
        ((401, "GatedRepo"), 1, "asks for consent before it gives the dataset owner/corpus: accept the terms"),
        ((403, None), 1, r"no dataset owner/corpus, or it is private \(status 403\): log in with .* or set HF_TOKEN"),
        ((401, "RepoNotFound"), 1, "has no dataset owner/corpus, or it is private .*HF_TOKEN, or prepare from a local"),
        ((404, "RevisionNotFound"), 1, "no revision main of it: set --revision"),
        ((503, None), 2, r"fails to give the dataset owner/corpus \(status 503\): try again later, or prepare"),
        ((429, None), 4, r"fails to give the dataset owner/corpus \(status 429\)"),
    ],
)
def test_a_refusal_is_one_sentence(
    server: HubServer, refusal: tuple[int, str | None], attempts: int, message: str
) -> None:
    server.refusal = refusal
    with pytest.raises(UserError, match=message) as caught:
        HubFiles(REPO).listing()
    assert "\n" not in str(caught.value)
    assert len(server.asked) == attempts


def test_patience_grows_once_the_hub_has_answered(server: HubServer, big: SourceFile, tmp_path: Path) -> None:
    source = HubFiles(REPO)
    server.refusal, server.failing = (503, None), 2
    with pytest.raises(UserError, match="status 503"):
        source.listing()
    server.refusal, server.failing = (429, None), 3  # also at first contact: machines of one preparation begin together
    assert source.listing().files
    server.refusal, server.failing = (503, None), 3
    assert source.provide(big, tmp_path).read_bytes() == CONTENT


def test_a_store_that_refuses_a_link_is_asked_by_a_fresh_one(
    server: HubServer, source: HubFiles, big: SourceFile, tmp_path: Path
) -> None:
    """Its signature may have expired."""
    source.listing()
    server.store_refusals = 2
    assert source.provide(big, tmp_path / "a").read_bytes() == CONTENT
    assert len([path for path, _ in server.asked if "/resolve/" in path]) == 3
    server.store_refusals = 4
    with pytest.raises(UserError, match=r"^The store of the dataset owner/corpus refuses the hub's links \(status 403"):
        source.provide(big, tmp_path / "b")


def test_nobody_there_and_nobody_who_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "FIRST_WAITS", (0.0,))
    monkeypatch.setattr(hub_module, "CONTACT_SECONDS", 0.05)
    said = r"cannot be reached for the dataset owner/corpus \(.+\): check the network"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=said):
            HubFiles(REPO).listing()
    with pytest.raises(UserError, match=said):
        HubFiles(REPO).listing()


def test_something_else_answers(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.data.hub_server.json.dumps", lambda content: "<html>log in</html>")
    with pytest.raises(UserError, match=r"cannot be reached .*: check the network, HF_ENDPOINT and proxies"):
        HubFiles(REPO).listing()


def test_offline_mode_says_so(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so the dataset owner/corpus is not fetched: unset it"):
        HubFiles(REPO).listing()
    assert server.asked == []


def test_a_tokenizer_is_fetched_once(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = server.folder / "models" / "openai-community" / "gpt2"
    model.mkdir(parents=True)
    with pytest.raises(UserError, match=r"The hub has the model openai-community/gpt2, but .*: give a local tokenizer"):
        fetch_tokenizer("openai-community/gpt2")
    (model / "tokenizer.json").write_text("{}")
    path = fetch_tokenizer("openai-community/gpt2")
    assert path.read_text() == "{}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_tokenizer("openai-community/gpt2") == path
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set, so the model .*give a local tokenizer\.json with"):
        fetch_tokenizer("EleutherAI/gpt-neox-20b")
