"""Files at an address (s3://, gs://, hf://), fetched by litdata's downloaders.

Every wait has an end: that of the limits here for s3://, that of their clients for gs:// and hf://. By default
litdata's client for S3 sends a failing request up to a thousand times.
"""

import errno
import io
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from anlit.errors import UserError, install

S3_LIMITS = {
    "connect_timeout": 5,
    "read_timeout": 10,
    "retries": {"total_max_attempts": 3, "mode": "standard"},
}
SMALL_FILE_BYTES = (
    256 << 20
)  # most of a manifest, an index (enough for a million chunks) or a tokenizer
MISSING = ("NotFound", "RemoteEntryNotFoundError")  # what the clients of gs:// and hf:// raise


def is_remote(path: str) -> bool:
    return "://" in path


def fetch_bytes(address: str) -> bytes:
    """A small file; errors are those of `fetch`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        target = Path(folder, "file")
        fetch(address, target, SMALL_FILE_BYTES)
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


def fetch(address: str, target: Path, limit: int) -> None:
    """Fetch a file of at most `limit` bytes (hf:// ignores it) to `target`, which is complete when this has returned.

    Raises FileNotFoundError, or UserError if the address cannot be reached or refuses, stalls, or gives too much.
    """
    downloader = _downloader(address.partition("://")[0] + "://", os.getpid())
    try:
        if address.startswith("hf://"):  # its client writes files only
            downloader.download_file(address, str(target))
        else:
            with _Bounded(target, limit, address) as file:
                downloader.download_fileobj(address, file)
    except UserError:
        raise
    except Exception as error:
        raise _explained(error, address) from error
    if (
        not target.exists()
    ):  # litdata passes over FileNotFoundError, which huggingface_hub raises without a network
        raise UserError(
            f"Cannot read {address}: there is no connection to it; check the address and the network."
        )


@lru_cache
def _downloader(scheme: str, process: int) -> Any:
    """litdata's downloader. Each process has its own, because the clients do not survive a fork."""
    from litdata.streaming.downloader import LocalDownloader, get_downloader

    options: dict[str, Any] = {}
    if scheme == "s3://":
        from botocore.config import Config

        options = {"config": Config(**S3_LIMITS)}
    elif scheme == "hf://":
        options = {"etag_timeout": 5.0}
        # It logs each of its attempts; only the outcome matters.
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        downloader = get_downloader(scheme, "", [], options)
    except ImportError as error:
        # boto3 and huggingface_hub are always installed.
        remedy = install("gs", "google-cloud-storage") if scheme == "gs://" else str(error)
        raise UserError(
            f"Reading from {scheme} needs a package that is not installed: {remedy}."
        ) from error
    if type(downloader) is LocalDownloader:  # litdata's fallback
        raise UserError(
            f"There is no way to fetch from {scheme}: use a local folder, s3://, gs:// or hf://."
        )
    return downloader


def _explained(error: Exception, address: str) -> Exception:
    response = getattr(error, "response", None)
    code = (
        response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    )  # botocore's
    # Hugging Face's LocalEntryNotFoundError is a FileNotFoundError too, and says that there is no connection.
    if (
        code in ("404", "NoSuchKey")
        or type(error) is FileNotFoundError
        or type(error).__name__ in MISSING
    ):
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
