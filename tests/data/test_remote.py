"""Shards in object storage: the batches of the local folder, a download per chunk, short errors."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from litdata.streaming import downloader as litdata_downloader

from anlit.data import streams as stream_module
from anlit.data.storage import remote
from anlit.data.storage import store as store_module
from anlit.data.storage.manifest import read_manifest
from anlit.data.storage.shards import Chunk, read_token_arrays
from anlit.data.storage.store import ChunkCache, TokenStore
from anlit.errors import RunError, UserError
from tests.data.modules import blocks_of, ready
from tests.data.processes import finish, start, wait_for
from tests.data.servers import ObjectStore, serving

ADDRESS = "s3://bucket/corpus"
HUB_ADDRESS = "hf://datasets/somebody/corpus"
S3_ENVIRONMENT = {
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "something",
}
N_CHUNKS = 7
CHUNK_TOKENS = 7001


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """It outlives the test: a loader that stays open would download removed chunks again."""
    folder = tmp_path_factory.mktemp("remote") / "cache"
    monkeypatch.setattr(store_module, "cache_root", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A single server for all tests, because making a client takes long."""
    with serving(ObjectStore(tmp_path_factory.mktemp("served"))) as running:
        yield running
    remote._downloader.cache_clear()


@pytest.fixture
def store(server: ObjectStore, prepared: str, monkeypatch) -> ObjectStore:
    """A server with a fresh copy of `prepared` that boto3 takes for S3."""
    shutil.rmtree(server.root)
    shutil.copytree(prepared, server.root / "bucket" / "corpus")
    server.behave()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def new_client() -> Iterator[None]:
    """For a test that changes the settings of a client."""
    remote._downloader.cache_clear()
    yield
    remote._downloader.cache_clear()


def open_store(limit_bytes: int = 10**9) -> TokenStore:
    arrays = read_token_arrays(ADDRESS, read_manifest(ADDRESS))
    return TokenStore(arrays["train"][0], limit_bytes)


def assert_holds(reader: TokenStore, streams: dict[str, np.ndarray]) -> None:
    """The store gives all training tokens."""
    np.testing.assert_array_equal(reader.read(0, 46_000), streams["train"])


def cached_copy(reader: TokenStore, number: int) -> Path:
    assert reader.cache is not None
    return reader.cache.path(reader.array.chunks[number])


def cached_chunks(folder: Path) -> list[int]:
    return sorted(int(path.stem[-1]) for path in folder.rglob("*.bin"))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_equal_those_of_the_local_folder(
    store: ObjectStore, prepared: str, workers: int
) -> None:
    local_data = ready(prepared)
    data = ready(ADDRESS, num_workers=workers)

    training_blocks = blocks_of(data.train_dataloader())
    val_blocks = blocks_of(data.val_dataloader())
    data.teardown("fit")

    blocks_from_cache = blocks_of(ready(ADDRESS).train_dataloader())
    assert training_blocks == blocks_of(local_data.train_dataloader())
    assert training_blocks == blocks_from_cache
    assert val_blocks == blocks_of(local_data.val_dataloader())
    assert store.fetched("train/chunk") == N_CHUNKS
    assert store.fetched("val/chunk") == 1


def test_processes_with_one_cache_download_each_chunk_once(
    store: ObjectStore, streams: Any, cache_folder: Path
) -> None:
    partial = cached_copy(open_store(), 0).with_name("chunk-0-0.bin.partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"from a process that was killed")

    def read_all() -> None:
        assert_holds(open_store(), streams)

    processes = [start(read_all) for _ in range(4)]

    exit_codes = [finish(process) for process in processes]
    assert exit_codes == [0, 0, 0, 0]
    assert store.fetched("train/chunk") == N_CHUNKS
    assert not list(cache_folder.rglob("*.partial"))


def test_the_cache_keeps_the_chunks_that_were_used_last(
    store: ObjectStore, streams: Any, cache_folder: Path
) -> None:
    limit_bytes = 45_000  # three chunks
    reader = open_store(limit_bytes)
    for _ in range(2):  # the removed files are still open
        assert_holds(reader, streams)
    assert cached_chunks(cache_folder) == [4, 5, 6]
    assert store.fetched("train/chunk") == N_CHUNKS

    for number in (4, 5):
        os.utime(cached_copy(reader, number), (number, number))
    open_store(limit_bytes).read(CHUNK_TOKENS * 4, 10)
    open_store(limit_bytes).read(0, 10)

    assert cached_chunks(cache_folder) == [0, 4, 6]


def test_a_full_cache_is_not_listed_for_each_download(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 100,000 chunks, a look at each takes seconds."""
    chunk_bytes = 100
    n_fit = 64
    n_downloads = 4 * n_fit
    array: Any = SimpleNamespace(folder=ADDRESS, manifest={"content_sha256": "0" * 64})
    cache = ChunkCache(array, n_fit * chunk_bytes)
    listed_folders = []
    scandir = os.scandir

    def list_folder(folder: Any) -> Any:
        listed_folders.append(str(folder))
        return scandir(folder)

    def write_chunk(address: str, target: Path, size: int) -> None:
        target.write_bytes(b"x" * size)
        seconds = int(target.name.partition(".")[0])
        os.utime(target, (seconds, seconds))

    monkeypatch.setattr(remote, "download", write_chunk)
    monkeypatch.setattr(store_module, "N_LOCKS", 4)
    monkeypatch.setattr(os, "scandir", list_folder)

    for number in range(n_downloads):
        cache.fetch(Chunk(f"{number}.bin", chunk_bytes, chunk_bytes, 0))

    assert listed_folders.count(str(cache.folder)) < n_downloads / 3
    kept_numbers = sorted(int(path.stem) for path in cache.folder.glob("*.bin"))
    assert n_fit - n_fit // 16 <= len(kept_numbers) <= n_fit
    assert kept_numbers == [*range(n_downloads - len(kept_numbers), n_downloads)]
    assert len(list(cache.folder.glob("*.lock"))) <= 4


def test_a_chunk_that_is_damaged_in_the_cache_is_downloaded_again(
    store: ObjectStore, streams: Any
) -> None:
    reader = open_store()
    reader.read(0, 46_000)
    os.truncate(cached_copy(reader, 2), 1000)

    assert_holds(open_store(), streams)
    assert store.fetched("chunk-0-2") == 2


def test_a_chunk_that_arrives_damaged_is_downloaded_again(store: ObjectStore, streams: Any) -> None:
    store.damage["/bucket/corpus/train/chunk-0-2.bin"] = 1

    assert_holds(open_store(), streams)
    assert store.fetched("chunk-0-2") == 2


def test_a_chunk_that_arrives_damaged_twice_is_an_error(
    store: ObjectStore, cache_folder: Path
) -> None:
    store.damage["/bucket/corpus/train/chunk-0-2.bin"] = 5

    message = r"s3://bucket/.*chunk-0-2.bin is damaged \(its CRC-32 .*prepare"
    with pytest.raises(UserError, match=message):
        open_store().read(0, 46_000)

    assert cached_chunks(cache_folder) == [0, 1]
    assert store.fetched("chunk-0-2") == 2


def test_a_missing_chunk_is_one_sentence_also_from_a_worker(store: ObjectStore) -> None:
    (store.root / "bucket" / "corpus" / "train" / "chunk-0-5.bin").unlink()

    message = r"^s3://bucket/corpus/train/chunk-0-5.bin is damaged \(it is missing\): .+$"
    with pytest.raises(UserError, match=message):
        list(ready(ADDRESS, num_workers=1).train_dataloader())


def test_training_downloads_the_chunks_of_the_next_draws(store: ObjectStore, monkeypatch) -> None:
    """A chunk has 109 blocks: 430 draws need four chunks, and later a fifth."""
    monkeypatch.setattr(stream_module, "DRAWS_AHEAD", 430)
    loader = ready(ADDRESS, shuffle=False).train_dataloader()
    batches = iter(loader)

    next(batches)
    wait_for(lambda: store.fetched("train/chunk") == 4)
    for number in range(4):
        assert store.fetched(f"chunk-0-{number}") == 1

    for _ in range(20):
        next(batches)
    wait_for(lambda: store.fetched("train/chunk") == 5)
    assert store.fetched("train/chunk-0-4") == 1
    loader.close()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, r"(ClientError|AccessDenied).*: check the address"),
        (500, r".*check the address, the network"),
    ],
)
def test_a_server_that_refuses_is_one_sentence(
    store: ObjectStore, status: int, message: str
) -> None:
    store.status = status

    problem = r"^s3://bucket/corpus/manifest\.json cannot be read \("
    with pytest.raises(UserError, match=problem + message) as caught:
        ready(ADDRESS)

    assert "\n" not in str(caught.value)
    assert len(store.requests) <= 3


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "s3://bucket/other",
            "^there is no s3://bucket/other/manifest.json: set --data.path to a prepared folder",
        ),
        (
            "ftp://host/corpus",
            "^ftp:// is not an address that can be read: use a local folder, s3://, gs:// or hf://",
        ),
    ],
)
def test_an_address_that_cannot_be_read_is_one_sentence(
    store: ObjectStore, address: str, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ready(address)

    assert "\n" not in str(caught.value)
    assert len(store.requests) <= 3


def test_a_server_that_does_not_answer_is_one_sentence(
    store: ObjectStore, new_client: None, monkeypatch
) -> None:
    monkeypatch.setitem(remote.S3_LIMITS, "read_timeout", 0.3)
    store.silent = True

    message = r"^s3://bucket/corpus/manifest.json cannot be read \(ReadTimeout.*: check the"
    with pytest.raises(UserError, match=message):
        ready(ADDRESS)


def test_a_full_disk_is_one_sentence(store: ObjectStore, monkeypatch) -> None:
    reader = open_store()
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(litdata_downloader.S3Downloader, "download_fileobj", full)

    message = r"^the disk that caches s3://.* is full: free it, set LITDATA_CACHE_DIR"
    with pytest.raises(RunError, match=message):
        reader.read(0, 1)


def test_a_file_that_is_larger_than_expected_fills_no_disk(
    store: ObjectStore, cache_folder: Path
) -> None:
    reader = open_store()
    size = reader.array.chunks[0].size
    (store.root / "bucket" / "corpus" / "train" / "chunk-0-0.bin").write_bytes(bytes(50 * size))

    message = rf"chunk-0-0\.bin has more than the {size:,} bytes that were expected: check the"
    with pytest.raises(UserError, match=message):
        reader.read(0, 1)

    assert sum(path.stat().st_size for path in cache_folder.rglob("*.partial")) <= size


def test_google_storage_gives_the_batches_of_the_local_folder(
    new_client: None, prepared: str, monkeypatch
) -> None:
    def download(self: object, address: str, file: Any) -> None:
        file.write(Path(prepared, address.removeprefix("gs://bucket/plain/")).read_bytes())

    monkeypatch.setattr(litdata_downloader, "_GOOGLE_STORAGE_AVAILABLE", True)
    monkeypatch.setattr(litdata_downloader.GCPDownloader, "download_fileobj", download)

    data = ready("gs://bucket/plain", num_workers=1)

    expected = blocks_of(ready(prepared).train_dataloader())
    assert blocks_of(data.train_dataloader()) == expected


def test_a_missing_client_of_google_storage_is_named(new_client: None, monkeypatch) -> None:
    monkeypatch.setattr(litdata_downloader, "_GOOGLE_STORAGE_AVAILABLE", False)

    with pytest.raises(UserError, match=r"gs:// needs .*: run `make extras EXTRAS=gs`"):
        ready("gs://bucket/plain")


def test_hugging_face_gives_the_batches_of_the_local_folder(prepared: str, monkeypatch) -> None:
    downloads = []

    def download(repo: str, path: str, **options: Any) -> Any:
        file = Path(prepared, path.removeprefix("shards/"))
        if options.get("dry_run"):
            return SimpleNamespace(file_size=file.stat().st_size)
        downloads.append((repo, path, options["repo_type"], options["revision"]))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    data = ready(f"{HUB_ADDRESS}@v2/shards")

    expected = blocks_of(ready(prepared).train_dataloader())
    assert blocks_of(data.train_dataloader()) == expected
    assert downloads[0] == ("somebody/corpus", "shards/manifest.json", "dataset", "v2")
    chunks = [path for _, path, _, _ in downloads if "train/chunk" in path]
    assert len(chunks) == N_CHUNKS


def test_a_file_of_hugging_face_that_is_larger_than_expected_is_not_downloaded(
    monkeypatch,
) -> None:
    def download(repo: str, path: str, **options: Any) -> Any:
        assert options.get("dry_run"), "the whole file is downloaded"
        return SimpleNamespace(file_size=50 * 2**30)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    message = r"manifest\.json has more than the [\d,]+ bytes that were expected: check the"
    with pytest.raises(UserError, match=message):
        ready(HUB_ADDRESS)


def test_hugging_face_without_a_connection_is_one_sentence(monkeypatch) -> None:
    no_connection = LocalEntryNotFoundError("An error happened on the Hub.\nMore.")
    download = Mock(side_effect=no_connection)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    with pytest.raises(UserError, match=r"^hf://[^\n]* cannot be read, there is no con"):
        ready(HUB_ADDRESS)
