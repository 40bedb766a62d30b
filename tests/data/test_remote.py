"""Shards in object storage: the same batches as from the disk, one fetch per chunk, and short words when it fails."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from litdata.streaming import downloader as litdata_downloader

from anlit.data import streams as order_streams
from anlit.data.storage import remote
from anlit.data.storage import store as store_module
from anlit.data.storage.manifest import read_manifest
from anlit.data.storage.shards import read_sources
from anlit.data.storage.store import TokenStore
from anlit.errors import UserError
from tests.data.modules import blocks_of, ready
from tests.data.processes import finish, start, wait_for
from tests.data.servers import ObjectStore, serving

ADDRESS = "s3://bucket/corpus"
ON_HUB = "hf://datasets/somebody/corpus"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """It outlives the test: a loader that is not closed would fetch what is removed again."""
    folder = tmp_path_factory.mktemp("remote") / "cache"
    monkeypatch.setattr(store_module, "cache_root", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """One server for all, because to make a client for a new one takes long."""
    with serving(ObjectStore(tmp_path_factory.mktemp("served"))) as running:
        yield running
    remote._downloader.cache_clear()


@pytest.fixture
def store(server: ObjectStore, prepared: str, monkeypatch) -> ObjectStore:
    """A server of a fresh copy of `prepared` that boto3 takes for S3."""
    shutil.rmtree(server.root)
    shutil.copytree(prepared, server.root / "bucket" / "corpus")
    server.behave()
    own = {
        "ENDPOINT_URL": server.address,
        "DEFAULT_REGION": "us-east-1",
        "EC2_METADATA_DISABLED": "true",
    }
    for name, value in {
        **own,
        "ACCESS_KEY_ID": "somebody",
        "SECRET_ACCESS_KEY": "something",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return server


@pytest.fixture
def other_client() -> Iterator[None]:
    """For a test that changes what a client is made from."""
    remote._downloader.cache_clear()
    yield
    remote._downloader.cache_clear()


def store_of(limit_bytes: int = 10**9) -> TokenStore:
    return TokenStore(read_sources(ADDRESS, read_manifest(ADDRESS))["train"][0], limit_bytes)


def copy_of(reader: TokenStore, number: int) -> Path:
    assert reader.cache is not None
    return reader.cache.path(reader.source.chunks[number])


def cached(folder: Path) -> list[int]:
    return sorted(int(path.stem[-1]) for path in folder.rglob("*.bin"))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_are_those_of_the_local_folder(
    store: ObjectStore, prepared: str, workers: int
) -> None:
    data, local = ready(ADDRESS, num_workers=workers), ready(prepared)
    expected = blocks_of(list(local.train_dataloader()))
    assert blocks_of(list(data.train_dataloader())) == expected
    data.teardown("fit")
    assert blocks_of(list(data.val_dataloader())) == blocks_of(list(local.val_dataloader()))
    assert blocks_of(list(ready(ADDRESS).train_dataloader())) == expected
    assert (store.fetched("train/chunk"), store.fetched("val/chunk")) == (7, 1)


def test_processes_on_one_cache_fetch_each_chunk_once(
    store: ObjectStore, streams: Any, cache_folder: Path
) -> None:
    reader = store_of()
    copy_of(reader, 0).parent.mkdir(parents=True)
    copy_of(reader, 0).with_name("chunk-0-0.bin.partial").write_bytes(
        b"left by one that was killed"
    )
    read_all = lambda: np.testing.assert_array_equal(store_of().read(0, 46_000), streams["train"])  # noqa: E731
    assert [finish(process) for process in [start(read_all) for _ in range(4)]] == [0] * 4
    assert store.fetched("train/chunk") == 7
    assert not list(cache_folder.rglob("*.partial"))


def test_the_cache_keeps_what_was_used_last(
    store: ObjectStore, streams: Any, cache_folder: Path
) -> None:
    reader = store_of(limit_bytes=45_000)  # three chunks
    for _ in range(2):  # the removed files are still open
        assert np.array_equal(reader.read(0, 46_000), streams["train"])
    assert cached(cache_folder) == [4, 5, 6]
    assert store.fetched("train/chunk") == 7
    for number in (4, 5):
        os.utime(copy_of(reader, number), (number, number))
    store_of(45_000).read(7001 * 4, 10)
    store_of(45_000).read(0, 10)
    assert cached(cache_folder) == [0, 4, 6]


def test_a_chunk_that_does_not_end(store: ObjectStore, cache_folder: Path) -> None:
    chunk = store.root / "bucket" / "corpus" / "train" / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes() * 400)
    with pytest.raises(UserError, match=r"chunk-0-0\.bin is longer than 14,014 bytes"):
        store_of().read(0, 10)
    assert max(path.stat().st_size for path in cache_folder.rglob("*.partial")) <= 14_014


@pytest.mark.parametrize("damage", [0, 1, 5])
def test_a_damaged_chunk_is_fetched_again(
    store: ObjectStore, streams: Any, damage: int, cache_folder: Path
) -> None:
    """Damaged in the cache, once on the way, or always."""
    if damage == 0:
        reader = store_of()
        reader.read(0, 46_000)
        os.truncate(copy_of(reader, 2), 1000)
    store.damage["/bucket/corpus/train/chunk-0-2.bin"] = damage
    if damage == 5:
        with pytest.raises(
            UserError, match=r"s3://bucket/.*chunk-0-2.bin is damaged \(its CRC-32 .*prepare"
        ):
            store_of().read(0, 46_000)
        assert cached(cache_folder) == [0, 1]
    else:
        assert np.array_equal(store_of().read(0, 46_000), streams["train"])
    assert store.fetched("chunk-0-2") == 2


def test_a_missing_chunk_is_one_sentence(store: ObjectStore) -> None:
    """Also from a worker process."""
    (store.root / "bucket" / "corpus" / "train" / "chunk-0-5.bin").unlink()
    with pytest.raises(
        UserError,
        match=r"^s3://bucket/corpus/train/chunk-0-5.bin is damaged \(it is missing\): .+$",
    ):
        list(ready(ADDRESS, num_workers=1).train_dataloader())


def test_training_fetches_ahead(store: ObjectStore, monkeypatch) -> None:
    """The chunks of the next draws: 430 begin in the first four, of 109 blocks each; of the next, when it is there."""
    monkeypatch.setattr(order_streams, "DRAWS_AHEAD", 430)
    loader = ready(ADDRESS, shuffle=False).train_dataloader()
    batches = iter(loader)
    for there, n_batches in (({0, 1, 2, 3}, 1), ({0, 1, 2, 3, 4}, 20)):
        for _ in range(n_batches):
            next(batches)
        wait_for(lambda there=there: store.fetched("train/chunk") == len(there))
        assert {number for number in range(7) if store.fetched(f"chunk-0-{number}")} == there
    loader.close()


@pytest.mark.parametrize(("status", "address", "said"), [
    (403, ADDRESS, r"^Cannot read s3://bucket/corpus/manifest.json \((ClientError|AccessDenied).*: check the addr"),
    (500, ADDRESS, r"^Cannot read s3://bucket/corpus/manifest.json \(.*check the address, the network"),
    (200, "s3://bucket/other", r"^There is no s3://bucket/other/manifest.json, so it is not a prepared folder"),
    (200, "ftp://host/corpus", "no way to fetch from ftp://: use a local folder, s3://, gs:// or hf://"),
])  # fmt: skip
def test_an_address_that_gives_nothing(
    store: ObjectStore, status: int, address: str, said: str
) -> None:
    store.status = status
    with pytest.raises(UserError, match=said) as caught:
        ready(address)
    assert "\n" not in str(caught.value)
    assert sum(store.requests.values()) <= 3


def test_no_answer(store: ObjectStore, other_client: None, monkeypatch) -> None:
    monkeypatch.setitem(remote.S3_LIMITS, "read_timeout", 0.3)
    store.silent = True
    with pytest.raises(
        UserError, match=r"^Cannot read s3://bucket/corpus/manifest.json \(ReadTimeout.*: check the"
    ):
        ready(ADDRESS)


def test_a_full_disk(store: ObjectStore, monkeypatch) -> None:
    reader, full = store_of(), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(litdata_downloader.S3Downloader, "download_fileobj", Mock(side_effect=full))
    with pytest.raises(
        UserError,
        match=r"^The disk is full where s3://.* is cached: free it, set LITDATA_CACHE_DIR",
    ):
        reader.read(0, 1)


def test_google_storage(other_client: None, prepared: str, monkeypatch) -> None:
    def download(self: object, address: str, file: Any) -> None:
        file.write(Path(prepared, address.removeprefix("gs://bucket/plain/")).read_bytes())

    monkeypatch.setattr(litdata_downloader, "_GOOGLE_STORAGE_AVAILABLE", False)
    with pytest.raises(
        UserError, match=r"Reading from gs:// needs a package .*: run `make extras EXTRAS=gs`"
    ):
        ready("gs://bucket/plain")
    monkeypatch.setattr(litdata_downloader, "_GOOGLE_STORAGE_AVAILABLE", True)
    monkeypatch.setattr(litdata_downloader.GCPDownloader, "download_fileobj", download)
    data = ready("gs://bucket/plain", num_workers=1)
    assert blocks_of(list(data.train_dataloader())) == blocks_of(
        list(ready(prepared).train_dataloader())
    )


def test_hugging_face(prepared: str, monkeypatch) -> None:
    asked = []

    def download(repo: str, path: str, **options: Any) -> str:
        asked.append((repo, path, options["repo_type"], options["revision"]))
        return str(Path(prepared, path.removeprefix("shards/")))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    data = ready(f"{ON_HUB}@v2/shards")
    assert blocks_of(list(data.train_dataloader())) == blocks_of(
        list(ready(prepared).train_dataloader())
    )
    assert asked[0] == ("somebody/corpus", "shards/manifest.json", "dataset", "v2")
    assert len([path for _, path, *_ in asked if "train/chunk" in path]) == 7
    no_connection = LocalEntryNotFoundError("An error happened on the Hub.\nMore.")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", Mock(side_effect=no_connection))
    with pytest.raises(UserError, match=r"^Cannot read hf://[^\n]*: there is no con"):
        ready(ON_HUB)
