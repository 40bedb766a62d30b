"""Corpora from the hub (a server on this machine): the same shards as from a copy, and refusals in one sentence."""

import gzip
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

import anlit
from anlit.cli import main
from anlit.config.files import FOLDER
from anlit.data.preparation import hub as hub_module
from anlit.data.preparation.hub import HubFiles, fetch_tokenizer
from anlit.data.preparation.recipes import HUB_TOKENIZERS, Recipe
from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import documents, json_lines, write
from tests.data.modules import ready
from tests.data.preparing import SIZES, assert_makes, interrupted, make, recipe_of, train_tokenizer
from tests.data.reader import hashes, read_files, read_texts
from tests.data.servers import COMMIT, Hub, serving_hub

CORPORA: dict[str, tuple[str, dict[str, Any]]] = {
    "SlimPajama": ("cerebras/SlimPajama-627B", {}), "OpenWebText": ("Skylion007/openwebtext", {"val_fraction": 0.2}),
    "FineWeb": ("HuggingFaceFW/fineweb", {"val_tokens": 500}),
    "FineWebBin": ("kjj0/fineweb10B-gpt2", {"tokenizer": "none"}),
}  # fmt: skip
TEXTS = list(documents(50, seed=1))[10:]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hub")
    at = {corpus: place / "datasets" / name for corpus, (name, _) in CORPORA.items()}
    layouts.slimpajama(
        at["SlimPajama"], {"train": TEXTS[:30], "validation": TEXTS[30:36], "test": TEXTS[36:]}
    )
    layouts.openwebtext(at["OpenWebText"], TEXTS, n_files=4)
    layouts.fineweb(at["FineWeb"], TEXTS, n_files=3)
    layouts.fineweb(at["FineWeb"], TEXTS[:4], n_files=1, sample="100BT")
    layouts.fineweb_bin(at["FineWebBin"], [list(range(100))] * 60, tokens_per_file=1500)
    for number in range(3):
        lines = gzip.compress(b"".join(json_lines(TEXTS[number::3], field="content")))
        for language in ("en", "de"):
            write(
                place / "datasets" / "allenai" / "c4" / language / f"c4-train.{number:05}.json.gz",
                lines,
            )
    for name in HUB_TOKENIZERS.values():
        train_tokenizer(
            write(place / "models" / name / "tokenizer.json", b""), 600 if "gpt2" in name else 700
        )
    for folder in at.values():
        write(folder / "README.md", b"read me")
    return place


@pytest.fixture
def server(repositories: Path, tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    with serving_hub(monkeypatch, repositories, tmp_path / "cache") as running:
        yield running


def from_hub(corpus: str) -> Recipe:
    return recipe_of(corpus, None, SIZES, **CORPORA[corpus][1])


@pytest.mark.parametrize("corpus", list(CORPORA))
def test_the_hub_gives_what_a_copy_gives(
    corpus: str, server: Hub, tmp_path: Path, out: Path
) -> None:
    manifest, (repository, options) = make(out, from_hub(corpus), workers=2), CORPORA[corpus]
    name = HUB_TOKENIZERS["gpt-neox" if corpus == "SlimPajama" else "gpt2"]
    own = {"tokenizer": str(server.root / "models" / name / "tokenizer.json"), **options}
    copy = make(
        tmp_path / "copy", recipe_of(corpus, server.root / "datasets" / repository, SIZES, **own)
    )
    differ = {name for name, _ in hashes(out).items() ^ hashes(tmp_path / "copy").items()}
    assert differ == {"manifest.json", "tasks/plan.json"}  # in where the files came from
    assert manifest["content_sha256"] == copy["content_sha256"]
    assert manifest["commit"] == COMMIT
    downloads = [path for path in server.asked if path.startswith("/blob/datasets")]
    assert (
        len(downloads) == len(set(downloads)) == manifest["files"]
    )  # also of those that are cut into parts
    assert {"repository": repository, "revision": "main"}.items() <= manifest["settings"].items()
    server.refusal = (503, "")  # a finished folder needs no hub
    assert make(out, from_hub(corpus)) == manifest
    shipped = yaml.safe_load(
        (FOLDER / "data" / f"{corpus.lower().replace('bin', '_bin')}.yaml").read_text()
    )["data"]
    assert shipped["class_path"] == f"anlit.{corpus}"
    own = {"path": str(out), "batch_size": 4, "num_workers": 0, "context_length": 32}
    data = getattr(anlit, corpus)(**shipped["init_args"] | own)
    data.prepare_data()
    data.setup()
    assert next(iter(data.train_dataloader())).tokens.shape == (4, 32)
    assert (data.bytes_per_token() is None) == (corpus == "FineWebBin")
    with pytest.raises(
        UserError, match=f"nowhere with {corpus}: prepare it with `anlit prepare {corpus} --output"
    ):
        getattr(anlit, corpus)(str(tmp_path / "nowhere")).prepare_data()


def test_any_data_set_by_name(server: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = [
        "--repo",
        "allenai/c4",
        "--files",
        "en/*.json.gz",
        "--text_field",
        "content",
        "--val_fraction",
        "0.2",
    ]
    assert main(["prepare", "Hub", *named]) == 0
    folder = tmp_path / "data" / "c4"
    assert sorted(read_texts(folder, "train") + read_texts(folder, "val")) == sorted(TEXTS)
    assert set(read_files(folder)) == {f"en/c4-train.0000{number}.json.gz" for number in range(3)}
    assert ready("data/c4", context_length=16).val_dataloader()


def test_going_on_holds_to_the_commit_that_was_begun_with(
    server: Hub, tmp_path: Path, out: Path
) -> None:
    """Also where a finished folder is mended: the branch may have moved."""
    make(tmp_path / "undisturbed", from_hub("FineWeb"))
    interrupted(out, from_hub("FineWeb"), tasks=1)
    for _ in ("goes on", "is mended"):
        server.asked.clear()
        assert_makes(out, from_hub("FineWeb"), tmp_path / "undisturbed")
        assert server.asked
        assert not [path for path in server.asked if "main" in path]
        (out / "train" / "chunk-000001-000.bin").unlink()


def test_a_listing_that_leads_out_of_the_folder(server: Hub, tmp_path: Path) -> None:
    """Each file of the listing is written, and removed when it has been read."""
    server.names = ["fineweb_train_../../../../precious.bin"]
    (tmp_path / "precious.bin").write_text("keep")
    with pytest.raises(
        UserError, match=r"^The hub's listing of kjj0/fineweb10B-gpt2 names a file .*not inside"
    ):
        make(tmp_path / "a" / "out", from_hub("FineWebBin"))
    assert (tmp_path / "precious.bin").read_text() == "keep"
    assert not [path for path in tmp_path.rglob("*.bin") if path.name != "precious.bin"]


def test_damage_on_the_way(server: Hub, tmp_path: Path, out: Path) -> None:
    make(tmp_path / "undisturbed", from_hub("OpenWebText"))
    server.damaged = 1
    with pytest.raises(
        UserError, match=r"plain_text/.* of the dataset .* arrived damaged \(.*SHA-256 .*network"
    ):
        make(out, from_hub("OpenWebText"))
    assert not list(out.rglob("source-*[!k]"))
    assert_makes(out, from_hub("OpenWebText"), tmp_path / "undisturbed")


@pytest.mark.parametrize(("refusal", "message"), [
    ((401, "GatedRepo"), "asks for consent before it gives the dataset allenai/c4: accept the terms"),
    ((401, "RepoNotFound"), "no dataset allenai/c4, or it is private: log in .* set HF_TOKEN, or prepare"),
    ((403, ""), r"127.0.0.1 fails to give the dataset allenai/c4 \(status 403\): try again .*clock"),
    ((404, "RevisionNotFound"), "no revision main of it: set --revision"),
    ((503, ""), r"fails to give the dataset allenai/c4 \(status 503\): try again .*, or prepare from"),
])  # fmt: skip
def test_a_refusal_is_one_sentence(server: Hub, refusal: tuple[int, str], message: str) -> None:
    with pytest.raises(
        UserError, match=r"no file that matches data/\*\.x in its revision main: set --revision"
    ):
        HubFiles("allenai/c4", patterns=["data/*.x"]).listing()
    server.asked.clear()
    server.refusal = refusal
    with pytest.raises(UserError, match=message) as caught:
        HubFiles("allenai/c4").listing()
    assert "\n" not in str(caught.value)
    assert len(server.asked) == 1


def test_something_else_nobody_who_answers_and_nobody_there(server: Hub, monkeypatch) -> None:
    said = r"cannot be reached for the dataset allenai/c4 \(.+\): check the network, HF_ENDPOINT and proxies"
    monkeypatch.setattr("tests.data.servers.json.dumps", lambda content: "<html>log in</html>")
    with pytest.raises(UserError, match=said):
        HubFiles("allenai/c4").listing()
    monkeypatch.setattr(hub_module, "CONTACT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=said):
            HubFiles("allenai/c4").listing()
    with pytest.raises(UserError, match=said):
        HubFiles("allenai/c4").listing()


def test_a_hub_that_is_not_there(server: Hub, tmp_path: Path, monkeypatch, capsys) -> None:
    """By the command, which works in the same place when the hub is there again."""
    command = ["prepare", "SlimPajama", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    said = "HF_HUB_OFFLINE is set, so the dataset cerebras/SlimPajama-627B is not fetched: unset it, or"
    assert line == f"anlit: error: {said} prepare from a local copy with --source DIR."
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert main(command) == 0


def test_a_tokenizer_is_fetched_once(server: Hub, monkeypatch) -> None:
    path = fetch_tokenizer("openai-community/gpt2")
    with pytest.raises(
        UserError, match=r"The hub has no model nobody/none.*: log in .*, or give a local tokenizer"
    ):
        fetch_tokenizer("nobody/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_tokenizer("openai-community/gpt2") == path
