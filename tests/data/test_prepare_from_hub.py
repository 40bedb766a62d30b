"""The corpora from the hub (a server on this machine): the same shards as from a copy, whatever comes between."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anlit.cli import main
from anlit.data.preparation import runner as run_module
from anlit.data.preparation.encode import encode_task
from anlit.data.preparation.recipe import HUB_TOKENIZERS, Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.hub_server import HubServer, alone_with
from tests.data.layouts import documents
from tests.data.preparing import (
    SIZES,
    finish,
    hashes,
    interrupted,
    make,
    read_json,
    recipe_of,
    start_command,
    train_tokenizer,
    wait_for,
)

REPOSITORIES = {
    "SlimPajama": "cerebras/SlimPajama-627B",
    "OpenWebText": "Skylion007/openwebtext",
    "FineWeb": "HuggingFaceFW/fineweb",
    "FineWebBin": "kjj0/fineweb10B-gpt2",
}
OPTIONS: dict[str, dict[str, Any]] = {"OpenWebText": {"val_fraction": 0.2}, "FineWeb": {"val_tokens": 500}}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four corpora and the tokenizers."""
    place = tmp_path_factory.mktemp("hub")
    some = list(documents(50, seed=1))[10:]
    at = {corpus: place / "datasets" / name for corpus, name in REPOSITORIES.items()}
    layouts.slimpajama(at["SlimPajama"], {"train": some[:30], "validation": some[30:36], "test": some[36:]})
    layouts.openwebtext(at["OpenWebText"], some, n_files=4)
    layouts.fineweb(at["FineWeb"], some, n_files=3)
    layouts.fineweb(at["FineWeb"], some[:4], n_files=1, sample="100BT")
    layouts.fineweb_bin(at["FineWebBin"], [list(range(100))] * 60, tokens_per_file=1500)
    for name in HUB_TOKENIZERS.values():
        folder = place / "models" / name
        folder.mkdir(parents=True)
        train_tokenizer(folder / "tokenizer.json", 600 if "gpt2" in name else 700)
    for folder in at.values():
        (folder / "README.md").write_text("read me")
    return place


@pytest.fixture
def server(repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with alone_with(monkeypatch, repositories, tmp_path) as running:
        yield running


def from_hub(corpus: str) -> Recipe:
    options = {"tokenizer": "none"} if corpus == "FineWebBin" else {}
    return recipe_of(corpus, None, SIZES, **OPTIONS.get(corpus, {}), **options)


def from_copy(corpus: str, server: HubServer) -> Recipe:
    name = "gpt-neox" if corpus == "SlimPajama" else "gpt2"
    tokenizer = str(server.folder / "models" / HUB_TOKENIZERS[name] / "tokenizer.json")
    options = {"tokenizer": "none" if corpus == "FineWebBin" else tokenizer, **OPTIONS.get(corpus, {})}
    return recipe_of(corpus, server.folder / "datasets" / REPOSITORIES[corpus], SIZES, **options)


def without_manifest(folder: Path) -> dict[str, str]:
    """The manifests differ in where the files came from."""
    return {name: value for name, value in hashes(folder).items() if name != "manifest.json"}


@pytest.mark.parametrize("corpus", list(REPOSITORIES))
def test_the_hub_gives_what_a_copy_gives(corpus: str, server: HubServer, tmp_path: Path) -> None:
    manifest = make(tmp_path / "out", from_hub(corpus), workers=2)
    copy = make(tmp_path / "copy", from_copy(corpus, server))
    assert without_manifest(tmp_path / "out") == without_manifest(tmp_path / "copy")
    assert manifest["content_sha256"] == copy["content_sha256"]
    assert manifest["pinned"] == {"commit": server.commit}
    assert (manifest["settings"]["repository"], manifest["settings"]["revision"]) == (REPOSITORIES[corpus], "main")
    server.refusal = (503, None)  # a finished folder needs no hub
    assert make(tmp_path / "out", from_hub(corpus)) == manifest


def test_fetched_files_go_as_soon_as_their_group_is_done(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[int] = []

    def counting(job: Any, task: Any) -> dict[str, Any]:
        at_once.append(len(list((tmp_path / "out" / ".work" / "source").rglob("*.parquet"))))
        return encode_task(job, task)

    monkeypatch.setattr(run_module, "encode_task", counting)
    monkeypatch.setattr(run_module, "GROUPS_AHEAD", 0)
    manifest = make(tmp_path / "out", from_hub("OpenWebText"))
    assert manifest["files"] == 4
    assert set(at_once) == {2}  # a group has two


def test_going_on_holds_to_the_commit_that_was_begun_with(server: HubServer, tmp_path: Path) -> None:
    make(tmp_path / "undisturbed", from_hub("FineWeb"))
    interrupted(tmp_path / "out", from_hub("FineWeb"), tasks=1)
    server.asked.clear()
    make(tmp_path / "out", from_hub("FineWeb"))
    assert server.asked
    assert not [path for path, _ in server.asked if "main" in path]  # the branch may have moved
    assert hashes(tmp_path / "out") == hashes(tmp_path / "undisturbed")
    (tmp_path / "out" / "train" / "chunk-000001-00000-000.bin").unlink()
    server.asked.clear()
    make(tmp_path / "out", from_hub("FineWeb"))
    assert not [path for path, _ in server.asked if "main" in path]
    assert hashes(tmp_path / "out") == hashes(tmp_path / "undisturbed")


@pytest.mark.parametrize("name", ["fineweb_train_../../../../precious.bin", "/precious.bin"])
def test_a_listing_that_leads_out_of_the_folder(name: str, server: HubServer, tmp_path: Path) -> None:
    """Each file of the listing is written, and removed when it has been read."""
    server.names = [name]
    (tmp_path / "precious.bin").write_text("keep")
    with pytest.raises(UserError, match=r"^The hub's listing of kjj0/fineweb10B-gpt2 names a file .*not inside"):
        make(tmp_path / "a" / "out", from_hub("FineWebBin"))
    assert (tmp_path / "precious.bin").read_text() == "keep"
    assert not [path for path in tmp_path.rglob("*.bin") if path.name != "precious.bin"]


def test_a_plan_that_leads_out_of_the_folder(server: HubServer, tmp_path: Path) -> None:
    """An unfinished folder of someone else names the files to fetch and to remove."""
    folder = tmp_path / "a" / "out"
    make(folder, from_hub("FineWebBin"))
    plan = {"settings": {}, "pinned": {"commit": server.commit}, "skipped": {}}
    files = [{"name": "../../../precious.bin", "size": 4, "sha256": None, "split": "train"}]
    settings = read_json(folder / "manifest.json")["settings"]
    (folder / "manifest.json").unlink()
    (folder / ".work").mkdir()
    (folder / ".work" / "plan.json").write_text(json.dumps({**plan, "settings": settings, "files": files}))
    (tmp_path / "precious.bin").write_text("keep")
    with pytest.raises(UserError, match=r"^The plan names a file '\.\./\.\./\.\./precious\.bin'"):
        make(folder, from_hub("FineWebBin"))
    assert (tmp_path / "precious.bin").read_text() == "keep"


def test_control_c_does_not_wait_for_a_download(server: HubServer, tmp_path: Path) -> None:
    server.held, server.drops = threading.Event(), [100] * 1000
    arguments = ["prepare", "FineWebBin", "--output", str(tmp_path / "out"), "--tokenizer", "none", "--workers", "1"]
    process = start_command(arguments, tmp_path / "output")
    wait_for(lambda: len(server.drops) < 1000)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process, 15) == 1  # the download stands still for longer
    server.held.set()
    assert (tmp_path / "output").read_text().endswith("is kept, repeat the command to go on.\n")
    server.drops.clear()
    make(tmp_path / "undisturbed", recipe_of("FineWebBin", None, {}, tokenizer="none"))
    make(tmp_path / "out", recipe_of("FineWebBin", None, {}, tokenizer="none"))
    assert hashes(tmp_path / "out") == hashes(tmp_path / "undisturbed")


def test_a_hub_that_is_not_there(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refusal = (503, None)
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "SlimPajama", "--output", "out"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("anlit: error: The hub fails to give the dataset cerebras/SlimPajama-627B (status 503)")
    assert line.endswith("--source DIR.")
    server.refusal = None
    assert main(["prepare", "SlimPajama", "--output", "out"]) == 0
    assert read_json(tmp_path / "out" / "manifest.json")["vocab_size"] == 700
