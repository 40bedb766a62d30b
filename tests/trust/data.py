"""Cases of data, tokenizers and hubs: letter D, and the numbered lines of the second trial."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anlit.data.preparation import hub as hub_module
from anlit.data.preparation import runner as run_module
from anlit.data.preparation.encode import encode_task
from tests.checkpoints.foreign import change_json
from tests.data import layouts
from tests.data.hub_server import HubServer, alone_with
from tests.data.layouts import documents
from tests.data.preparing import read_texts, train_tokenizer, write_texts
from tests.trust.place import NOTHING, Case, Outcome, Place

TEXTS = list(documents(40, seed=1))[10:]


def trained_on(place: Place, file: str, change: Callable[[Any], Any]) -> Outcome:
    """A run on a copy of the data in which a JSON file was changed."""
    data = place.own_data()
    change_json(data / file, change)
    return place.command(*place.fit(f"--data.path={data}", run_dir=place.folder / "new"))


def prepared(place: Place, change: Callable[[Any], Any], *more: str, texts: list[str] = TEXTS) -> Outcome:
    """`anlit prepare` with a changed tokenizer."""
    tokenizer = train_tokenizer(place.folder / "tokenizer.json", 500)
    change_json(tokenizer, change)
    write_texts(place.folder / "texts", texts)
    given = ["--source", place.folder / "texts", "--output", place.output, "--tokenizer", tokenizer, "--workers", "1"]
    return place.command("prepare", "TextFiles", *given, *more, state=lambda: manifest(place))


def manifest(place: Place) -> str:
    file = place.output / "manifest.json"
    if not file.exists():
        return "no manifest"
    content = json.loads(file.read_text())
    return f"vocab_size {content['vocab_size']:,}, {content['documents']} documents"


def ordinary(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["special"] = False


def gap(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["zzzz"] = 70_000


@contextmanager
def served(place: Place, patch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """OpenWebText on a hub of this machine."""
    layouts.openwebtext(place.folder / "hub" / "datasets" / "Skylion007" / "openwebtext", TEXTS)
    with alone_with(patch, place.folder / "hub", place.folder) as server:
        yield server


def from_hub(place: Place, wrong: Callable[[HubServer], Any], state: Callable[[Place], str] = manifest) -> Outcome:
    tokenizer = train_tokenizer(place.folder / "tokenizer.json", 500)
    with pytest.MonkeyPatch.context() as patch, served(place, patch) as server:
        patch.setattr(hub_module.time, "sleep", lambda seconds: None)
        wrong(server)
        given = ["--output", place.output, "--tokenizer", tokenizer, "--val_fraction", "0.2", "--workers", "1"]
        return place.command("prepare", "OpenWebText", *given, state=lambda: state(place))


def listing_with_dots(place: Place) -> Outcome:
    name = "plain_text/../../../../../precious.parquet"
    (place.folder / "precious.parquet").write_text("keep")

    def state(_: Place) -> str:
        return (
            f"the file outside {'as before' if (place.folder / 'precious.parquet').read_text() == 'keep' else 'lost'}"
        )

    return from_hub(place, lambda server: server.names.append(name), state)


def busy(server: HubServer) -> None:
    server.refusal, server.failing = (429, None), 2


def expired(server: HubServer) -> None:
    server.store_refusals = 1


def changed_while_read(place: Place) -> Outcome:
    def encode(job: Any, task: Any) -> dict[str, Any]:
        for piece in task.pieces:
            Path(piece.path).write_text("another text")
        return encode_task(job, task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "encode_task", encode)
        return prepared(place, lambda content: None)


def parallel_tokenizer(place: Place) -> Outcome:
    write_texts(place.folder / "texts", TEXTS * 3)
    given = ["--source", place.folder / "texts", "--output", place.output, "--vocab_size", "600", "--workers", "2"]
    own = [str(word) for word in given]
    return place.fresh("prepare", "TextFiles", *own, TOKENIZERS_PARALLELISM="true", state=lambda: (
        manifest(place).split(", ")[-1]
    ))  # fmt: skip


def copies(place: Place) -> Outcome:
    """Each text twice."""

    def state(_: Place) -> str:
        train, val = (set(read_texts(place.output, split)) for split in ("train", "val"))
        return f"{len(train & val)} texts on both sides"

    tokenizer = train_tokenizer(place.folder / "tokenizer.json", 500)
    layouts.openwebtext(place.folder / "twice", TEXTS * 2)
    given = ["--source", place.folder / "twice", "--output", place.output, "--tokenizer", tokenizer]
    options = ["--val_fraction", "0.2", "--workers", "1"]
    return place.command("prepare", "OpenWebText", *given, *options, state=lambda: state(place))


def line_break(place: Place) -> Outcome:
    (place.folder / "texts").mkdir()
    (place.folder / "texts" / "new\nline\x1b.jsonl").write_text("{}\n")
    given = ["--source", place.folder / "texts", "--pattern", "*.jsonl", "--output", place.output, "--workers", "1"]
    tokenizer = train_tokenizer(place.folder / "tokenizer.json", 500)
    return place.command("prepare", "TextFiles", *given, "--tokenizer", tokenizer, state=lambda: manifest(place))


CASES = [
    Case("D", "fit on data whose index.json names ../../secret",
         partial(trained_on, file="train/index.json",
                 change=lambda index: index["chunks"][0].update(filename="../../secret")),
         "2", "names a file '../../secret', which is not inside its folder", NOTHING),
    Case("D", "fit on data whose manifest.json has a path for a hash",
         partial(trained_on, file="manifest.json", change=lambda content: content.update(content_sha256="../../out")),
         "2", "has '../../out' where a SHA-256 belongs", NOTHING),
    Case("D", "fit on data whose index.json claims 10¹² tokens in a small file",
         partial(trained_on, file="train/index.json", change=lambda index: index["chunks"][0].update(dim=10**12)),
         "2", "tokens that take 2,000,000,000,012", NOTHING),
    Case("D", "prepare from a hub that lists a file with .. in its name", listing_with_dots,
         "2", r"names a file 'plain_text/\.\./.*not inside its folder", "the file outside as before"),
    Case("1", 'prepare with a tokenizer.json whose end-of-document token is "special": false',
         partial(prepared, change=ordinary), "2", 'inside of a text for the end of a document: set "special": true',
         "no manifest"),
    Case("2", "prepare --workers 2 with TOKENIZERS_PARALLELISM=true and a tokenizer to be trained", parallel_tokenizer,
         "0", "", "30 documents"),
    Case("3", "prepare with a tokenizer whose ids have a gap", partial(prepared, change=gap), "0", "",
         "vocab_size 70,001, 30 documents"),
    Case("4", "prepare, a source file changed while it is read", changed_while_read, "2",
         "was changed while it was read: repeat", "no manifest"),
    Case("5", "fit on data whose tokenizer.json was swapped",
         partial(trained_on, file="tokenizer.json", change=lambda content: content.update(truncation=None, own=1)),
         "2", "is not the tokenizer that made the tokens", NOTHING),
    Case("6", "prepare from a hub that is busy at first contact (429 twice)", partial(from_hub, wrong=busy), "0", "",
         "vocab_size 500, 30 documents"),
    Case("6", "prepare from a hub whose store refuses a link once (403)", partial(from_hub, wrong=expired), "0", "",
         "vocab_size 500, 30 documents"),
    Case("7", "prepare OpenWebText from files that have each text twice", copies, "0", "",
         "0 texts on both sides"),
    Case("8", "prepare, an error in a file with a line break in its name", line_break, "2", r"new\\nline\\x1b\.jsonl",
         "no manifest"),
]  # fmt: skip
