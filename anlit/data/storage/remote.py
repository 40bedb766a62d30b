"""Files at an address (s3://, gs://, hf://), fetched by litdata's downloaders; every wait has an end.

litdata's clients repeat failing requests for minutes or for ever. Here they try three times, and a fetch without
progress is given up.
"""

import errno
import io
import logging
import os
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from anlit.errors import UserError

STALL_SECONDS = 60.0
"""How long a fetch may bring nothing before it is given up."""
BLIND_STALL_SECONDS = 600.0
"""The same for hf://, where progress cannot be seen."""
SMALL_FILE_SECONDS = 12.0
"""The same for small files, which come at once or not at all."""
SMALL_FILE_BYTES = 256 << 20
"""Most bytes of a manifest, an index (enough for a million chunks) or a tokenizer, local or remote."""


def is_remote(path: str) -> bool:
    return "://" in path


def fetch_bytes(address: str) -> bytes:
    """A small file.

    Raises:
        FileNotFoundError: there is none.
        UserError: the place cannot be reached, or refuses.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        target = Path(folder, "file")
        fetch(address, target, SMALL_FILE_BYTES, SMALL_FILE_SECONDS)
        return target.read_bytes()


class _Bounded(io.FileIO):
    """A new file that refuses to grow beyond a limit."""

    def __init__(self, path: Path, limit: int, address: str) -> None:
        super().__init__(path, "wb")
        self.limit, self.address = limit, address

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.limit:
            raise UserError(
                f"{self.address} is longer than {self.limit:,} bytes, which is not what was announced: check that the "
                "address is that of a prepared folder."
            )
        return super().write(data)


def fetch(address: str, target: Path, limit: int, patience: float | None = None) -> None:
    """Fetch a file to `target`, which is complete only when this has returned.

    Args:
        limit: bytes that it may have; hf:// ignores it.
        patience: seconds without progress after which to give up.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the address cannot be reached or refuses, the answer stalls, or the file is too long.
    """
    downloader = _downloader(address.partition("://")[0] + "://", os.getpid())
    if patience is None:
        patience = STALL_SECONDS if _streams(downloader) else BLIND_STALL_SECONDS
    failure: list[BaseException] = []

    def work() -> None:
        try:
            if _streams(downloader):
                with _Bounded(target, limit, address) as file:
                    downloader.download_fileobj(address, file)
            else:
                downloader.download_file(address, str(target))
        except BaseException as error:  # to be raised where it is waited for
            failure.append(error)

    # The clients' own time limits add up to minutes, and not all of them have one: so a thread does it.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    progress = Progress(target)
    while thread.is_alive():
        thread.join(0.5)
        if thread.is_alive() and progress.idle_seconds() > patience:
            raise UserError(f"No answer from {address} for {patience:.0f} s: check the address and the network.")
    if failure:
        raise _explained(failure[0], address) from failure[0]
    if not target.exists():  # litdata passes over FileNotFoundError, which huggingface_hub raises without a network
        raise UserError(f"Cannot read {address}: there is no connection to it; check the address and the network.")


class Progress:
    """How long ago a file that another thread or process writes was last seen to grow."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._size, self._since = -1, time.monotonic()

    def idle_seconds(self) -> float:
        try:
            size = self.file.stat().st_size
        except FileNotFoundError:
            size = -1
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        return time.monotonic() - self._since


@lru_cache
def _downloader(scheme: str, process: int) -> Any:
    """litdata's downloader. Each process has its own, because the clients do not survive a fork."""
    from litdata.streaming.downloader import LocalDownloader, get_downloader

    options: dict[str, Any] = {}
    if scheme == "s3://":
        from botocore.config import Config

        retries: Any = {"total_max_attempts": 3, "mode": "standard"}
        options = {"config": Config(connect_timeout=5, read_timeout=20, retries=retries)}
    elif scheme == "hf://":
        options = {"etag_timeout": 5.0}
        # It logs each of its attempts; only the outcome matters.
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        downloader = get_downloader(scheme, "", [], options)
    except ImportError as error:
        # boto3 and huggingface_hub are always installed.
        remedy = "run `make extras EXTRAS=gs`" if scheme == "gs://" else str(error)
        raise UserError(f"Reading from {scheme} needs a package that is not installed: {remedy}.") from error
    if type(downloader) is LocalDownloader:  # litdata's fallback
        raise UserError(f"There is no way to fetch from {scheme}: use a local folder, s3://, gs:// or hf://.")
    return downloader


def _streams(downloader: Any) -> bool:
    """Whether it writes into an open file, so that its progress can be seen."""
    from litdata.streaming.downloader import Downloader

    return type(downloader).download_fileobj is not Downloader.download_fileobj


def _explained(error: BaseException, address: str) -> Exception:
    if isinstance(error, UserError):
        return error
    if _is_missing(error):
        return FileNotFoundError(address)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return UserError(
            f"The disk is full where {address} is cached: free it, set LITDATA_CACHE_DIR to a larger one, or a smaller "
            "--data.cache_gb."
        )
    said = (str(error) or repr(error)).strip().splitlines()[0].rstrip(".")[:300]
    return UserError(
        f"Cannot read {address} ({type(error).__name__}: {said}): check the address, the network and the credentials."
    )


def _is_missing(error: BaseException) -> bool:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return str(response.get("Error", {}).get("Code")) in ("404", "NoSuchKey")
    # Hugging Face's LocalEntryNotFoundError is a FileNotFoundError too, and says that there is no connection.
    return type(error) is FileNotFoundError or type(error).__name__ in ("NotFound", "RemoteEntryNotFoundError")
