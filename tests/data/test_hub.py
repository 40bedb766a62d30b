"""Corpora from the hub (a server on this machine): the shards of a copy, and plain refusals."""

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
from tests.data.layouts import json_lines, short_documents, write
from tests.data.modules import ready
from tests.data.preparing import SIZES, assert_makes, interrupt, make, recipe_of, train_tokenizer
from tests.data.reader import all_texts, hashes, read_files
from tests.data.servers import COMMIT, Hub, serving_hub

REPOSITORIES = {
    "SlimPajama": "cerebras/SlimPajama-627B",
    "OpenWebText": "Skylion007/openwebtext",
    "FineWeb": "HuggingFaceFW/fineweb",
    "FineWebBin": "kjj0/fineweb10B-gpt2",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SlimPajama": {},
    "OpenWebText": {"val_fraction": 0.2},
    "FineWeb": {"val_tokens": 500},
    "FineWebBin": {"tokenizer": "none"},
}
TOKENIZERS = {"SlimPajama": "gpt-neox", "OpenWebText": "gpt2", "FineWeb": "gpt2"}
TEXTS = short_documents(40, seed=1)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repositories of all corpora and tokenizers."""
    root = tmp_path_factory.mktemp("hub")
    folders = {corpus: root / "datasets" / name for corpus, name in REPOSITORIES.items()}
    texts_by_folder = {"train": TEXTS[:30], "validation": TEXTS[30:36], "test": TEXTS[36:]}
    layouts.slimpajama(folders["SlimPajama"], texts_by_folder)
    layouts.openwebtext(folders["OpenWebText"], TEXTS, n_files=4)
    layouts.fineweb(folders["FineWeb"], TEXTS, n_files=3)
    layouts.fineweb(folders["FineWeb"], TEXTS[:4], n_files=1, sample="100BT")
    layouts.fineweb_bin(folders["FineWebBin"], [list(range(100))] * 60, tokens_per_file=1500)
    for folder in folders.values():
        write(folder / "README.md", b"read me")
    write_c4(root / "datasets" / "allenai" / "c4")
    for tokenizer, vocab_size in (("gpt2", 600), ("gpt-neox", 700)):
        path = tokenizer_path(root, tokenizer)
        path.parent.mkdir(parents=True)
        train_tokenizer(path, vocab_size)
    return root


def write_c4(folder: Path) -> None:
    """Write `TEXTS` as three files of JSON lines, in two languages."""
    for number in range(3):
        lines = json_lines(TEXTS[number::3], field="content")
        content = gzip.compress(b"".join(lines))
        for language in ("en", "de"):
            write(folder / language / f"c4-train.{number:05}.json.gz", content)


def tokenizer_path(root: Path, tokenizer: str) -> Path:
    return root / "models" / HUB_TOKENIZERS[tokenizer] / "tokenizer.json"


@pytest.fixture
def server(repositories: Path, tmp_path: Path, monkeypatch) -> Iterator[Hub]:
    with serving_hub(monkeypatch, repositories, tmp_path / "cache") as running:
        yield running


def from_hub(corpus: str) -> Recipe:
    return recipe_of(corpus, None, SIZES, **OPTIONS[corpus])


def from_copy(corpus: str, root: Path) -> Recipe:
    """Return the recipe for the server's own files, with the same tokenizer as on the hub."""
    options = dict(OPTIONS[corpus])
    if corpus in TOKENIZERS:
        options["tokenizer"] = str(tokenizer_path(root, TOKENIZERS[corpus]))
    return recipe_of(corpus, root / "datasets" / REPOSITORIES[corpus], SIZES, **options)


def assert_shipped_configuration_reads(corpus: str, folder: Path) -> None:
    name = {"FineWebBin": "fineweb_bin"}.get(corpus, corpus.lower())
    fragment = (FOLDER / "data" / f"{name}.yaml").read_text()
    shipped = yaml.safe_load(fragment)["data"]
    options = {"path": str(folder), "batch_size": 4, "num_workers": 0, "context_length": 32}
    data_class = getattr(anlit, corpus)
    data = data_class(**shipped["init_args"] | options)
    data.prepare_data()
    data.setup()

    batch = next(iter(data.train_dataloader()))
    assert shipped["class_path"] == f"anlit.{corpus}"
    assert batch.tokens.shape == (4, 32)
    assert (data.bytes_per_token() is None) == (corpus == "FineWebBin")


@pytest.mark.parametrize("corpus", REPOSITORIES)
def test_a_corpus_that_is_not_prepared_names_the_command(corpus: str, tmp_path: Path) -> None:
    message = f"nowhere with {corpus}: prepare it with `anlit prepare {corpus} --output"
    data_class = getattr(anlit, corpus)
    data = data_class(str(tmp_path / "nowhere"))

    with pytest.raises(UserError, match=message):
        data.prepare_data()


@pytest.mark.parametrize("corpus", REPOSITORIES)
def test_the_hub_gives_what_a_copy_gives(
    corpus: str, server: Hub, tmp_path: Path, out: Path
) -> None:
    copy = tmp_path / "copy"
    copy_manifest = make(copy, from_copy(corpus, server.root))

    manifest = make(out, from_hub(corpus), workers=2)

    differences = hashes(out).items() ^ hashes(copy).items()
    differing_files = {name for name, _ in differences}
    assert differing_files == {"manifest.json", "tasks/plan.json"}
    assert manifest["content_sha256"] == copy_manifest["content_sha256"]
    assert manifest["commit"] == COMMIT
    assert manifest["settings"]["repository"] == REPOSITORIES[corpus]
    assert manifest["settings"]["revision"] == "main"
    # Each file is fetched once, also a file that is cut into pieces.
    downloads = [path for path in server.requested_paths if path.startswith("/blob/datasets")]
    assert len(downloads) == manifest["files"]
    assert len(set(downloads)) == manifest["files"]

    server.refusal = (503, "")  # a finished folder needs no hub
    assert make(out, from_hub(corpus)) == manifest
    assert_shipped_configuration_reads(corpus, out)


def test_any_data_set_by_name(server: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "Hub", "--repo", "allenai/c4", "--files", "en/*.json.gz"]

    assert main([*command, "--text_field", "content", "--val_fraction", "0.2"]) == 0

    folder = tmp_path / "data" / "c4"
    assert all_texts(folder) == sorted(TEXTS)
    expected_files = {f"en/c4-train.0000{number}.json.gz" for number in range(3)}
    assert read_files(folder).keys() == expected_files
    assert ready("data/c4", context_length=16).val_dataloader()


def test_going_on_holds_to_the_commit_of_the_beginning(
    server: Hub, tmp_path: Path, out: Path
) -> None:
    """Also where a finished folder is mended: the branch may have moved."""
    make(tmp_path / "undisturbed", from_hub("FineWeb"))
    interrupt(out, from_hub("FineWeb"), tasks=1)
    for _ in ("goes on", "is mended"):
        server.requested_paths.clear()

        assert_makes(out, from_hub("FineWeb"), tmp_path / "undisturbed")

        assert server.requested_paths
        assert not [path for path in server.requested_paths if "main" in path]
        (out / "train" / "chunk-000001-000.bin").unlink()


def test_a_listing_that_leads_out_of_the_folder(server: Hub, tmp_path: Path) -> None:
    """Each file of the listing is written, and removed when it has been read."""
    server.names = ["fineweb_train_../../../../precious.bin"]
    (tmp_path / "precious.bin").write_text("keep")

    message = r"^The hub's listing of kjj0/fineweb10B-gpt2 names a file .*not inside"
    with pytest.raises(UserError, match=message):
        make(tmp_path / "a" / "out", from_hub("FineWebBin"))

    assert (tmp_path / "precious.bin").read_text() == "keep"
    assert [path.name for path in tmp_path.rglob("*.bin")] == ["precious.bin"]


def test_damage_on_the_way(server: Hub, tmp_path: Path, out: Path) -> None:
    make(tmp_path / "undisturbed", from_hub("OpenWebText"))
    server.damaged = 1

    message = r"plain_text/.* of the dataset .* arrived damaged \(.*SHA-256 .*network"
    with pytest.raises(UserError, match=message):
        make(out, from_hub("OpenWebText"))

    assert not list(out.rglob("source-*[!k]"))
    assert_makes(out, from_hub("OpenWebText"), tmp_path / "undisturbed")


def test_a_pattern_that_matches_no_file(server: Hub) -> None:
    message = r"no file that matches data/\*\.x in its revision main: set --revision"
    with pytest.raises(UserError, match=message):
        HubFiles("allenai/c4", patterns=["data/*.x"]).listing()


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((401, "GatedRepo"), r"\(GatedRepoError, status 401\): check .*, accept the terms"),
        ((401, "RepoNotFound"), r"\(RepositoryNotFoundError, status 401\): check the name"),
        ((403, ""), r"\(HfHubHTTPError, status 403\): .* and log in with `hf auth login`"),
        ((404, "RevisionNotFound"), r"revision main \(RevisionNotFoundError, status 404\)"),
        (
            (503, ""),
            r"127.0.0.1 refuses the dataset allenai/c4 .* status 503\): .* or try again later, "
            "or prepare",
        ),
    ],
)
def test_a_refusal_is_one_sentence(server: Hub, refusal: tuple[int, str], message: str) -> None:
    with pytest.raises(UserError):  # the first request of a process may be repeated
        HubFiles("allenai/c4", patterns=["data/*.x"]).listing()
    server.requested_paths.clear()
    server.refusal = refusal

    with pytest.raises(UserError, match=message) as caught:
        HubFiles("allenai/c4").listing()

    assert "\n" not in str(caught.value)
    assert len(server.requested_paths) == 1


NO_CONTACT = r"cannot be reached for the dataset allenai/c4 \(.+\): check the network, HF_ENDPOINT"


def test_a_proxy_s_page_in_place_of_an_answer(server: Hub, monkeypatch) -> None:
    monkeypatch.setattr("tests.data.servers.json.dumps", lambda content: "<html>log in</html>")

    with pytest.raises(UserError, match=NO_CONTACT):
        HubFiles("allenai/c4").listing()


def test_a_port_that_never_answers_and_a_port_where_nothing_listens(
    server: Hub, monkeypatch
) -> None:
    monkeypatch.setattr(hub_module, "CONTACT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match=NO_CONTACT):
            HubFiles("allenai/c4").listing()

    with pytest.raises(UserError, match=NO_CONTACT):
        HubFiles("allenai/c4").listing()


def test_the_command_goes_on_in_the_same_folder_after_the_hub_was_away(
    server: Hub, tmp_path: Path, monkeypatch, capsys
) -> None:
    command = ["prepare", "SlimPajama", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert main(command) == 2

    (line,) = capsys.readouterr().err.strip().splitlines()
    problem = "HF_HUB_OFFLINE is set, so the dataset cerebras/SlimPajama-627B is not fetched"
    remedy = "unset it, or prepare from a local copy with --source DIR"
    assert line == f"anlit: error: {problem}: {remedy}"

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert main(command) == 0


def test_a_tokenizer_is_fetched_once(server: Hub, monkeypatch) -> None:
    path = fetch_tokenizer("openai-community/gpt2")
    message = r"refuses the model nobody/none .*: check the name.*, or give a local tokenizer"
    with pytest.raises(UserError, match=message):
        fetch_tokenizer("nobody/none")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert fetch_tokenizer("openai-community/gpt2") == path
