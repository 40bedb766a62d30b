"""Downloads files from an address (s3://, gs://, hf://) with litdata's downloaders.

Every wait has a limit. The limits for s3:// are here: by default litdata's client sends a failing
request up to a thousand times. The clients of gs:// and hf:// have other limits.
"""

import logging
import os
import tempfile
from functools import lru_cache
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

from anlit.errors import FULL_DISK_CODES, RunError, UserError, first_line
from anlit.packages import install_advice

S3_LIMITS = {
    "connect_timeout": 5,
    "read_timeout": 10,
    "retries": {"total_max_attempts": 3, "mode": "standard"},
}
HF_TIMEOUT_S = 5.0
MISSING_ERRORS = ("NotFound", "RemoteEntryNotFoundError")
"""Names of the errors that the clients of gs:// and hf:// raise for a missing file."""
MISSING_CODES = ("404", "NoSuchKey")
"""The same in the answers of s3://."""
LONGEST_REASON = 300


def is_remote(path: str) -> bool:
    return "://" in path


class BoundedFile(BufferedWriter):
    """A file that refuses more than `most_bytes`: a wrong address must not fill a disk."""

    def __init__(self, target: Path, most_bytes: int, address: str) -> None:
        super().__init__(FileIO(target, "wb"))
        self.most_bytes = most_bytes
        self.address = address

    def write(self, content: Any) -> int:
        refuse_larger(self.address, self.tell() + len(content), self.most_bytes)
        return super().write(content)


def refuse_larger(address: str, size: int, most_bytes: int) -> None:
    """Raise UserError for a file of more than `most_bytes`."""
    if size > most_bytes:
        raise UserError(
            f"{address} has more than the {most_bytes:,} bytes that were expected: check the "
            "address, or copy the folder there again"
        )


def download_bytes(address: str, most_bytes: int) -> bytes:
    """Return the content of a small file. Errors as in `download`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        target = Path(folder, "file")
        download(address, target, most_bytes)
        return target.read_bytes()


def download(address: str, target: Path, most_bytes: int) -> None:
    """Download a file to `target`.

    Raises FileNotFoundError. Raises UserError if the server cannot be reached, refuses or stalls,
    or if the file has more than `most_bytes`.
    """
    downloader = _downloader(address.partition("://")[0] + "://", os.getpid())
    try:
        if address.startswith("hf://"):  # its client writes files only, and them whole
            refuse_larger(address, _size_on_hub(address), most_bytes)
            downloader.download_file(address, str(target))
        else:
            with BoundedFile(target, most_bytes, address) as file:
                downloader.download_fileobj(address, file)
    except UserError:
        raise
    except Exception as error:
        raise _explain(error, address) from error
    # litdata ignores FileNotFoundError, which huggingface_hub raises without a network.
    if not target.exists():
        raise _no_connection(address)


def _size_on_hub(address: str) -> int:
    """Return the bytes of a file of hf://, as the hub says them; 0 if it does not."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from litdata.utilities.hf_fs import parse_hf_url

    repo, revision, path = parse_hf_url(address)
    try:
        file: Any = hf_hub_download(
            repo,
            path,
            repo_type="dataset",
            revision=revision,
            etag_timeout=HF_TIMEOUT_S,
            dry_run=True,
        )
    except LocalEntryNotFoundError as error:
        raise _no_connection(address) from error
    return int(file.file_size or 0)


def _no_connection(address: str) -> UserError:
    return UserError(
        f"{address} cannot be read, there is no connection to it: check the address and the network"
    )


@lru_cache
def _downloader(scheme: str, process_id: int) -> Any:
    """Return litdata's downloader. Each process needs a new client, no client survives a fork."""
    from litdata.streaming.downloader import LocalDownloader, get_downloader

    options: dict[str, Any] = {}
    if scheme == "s3://":
        from botocore.config import Config

        options = {"config": Config(**S3_LIMITS)}
    elif scheme == "hf://":
        options = {"etag_timeout": HF_TIMEOUT_S}
        # It logs every attempt; only the outcome matters.
        logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    try:
        downloader = get_downloader(scheme, "", [], options)
    except ImportError as error:
        # boto3 and huggingface_hub are always installed.
        fix = install_advice("gs", "google-cloud-storage") if scheme == "gs://" else str(error)
        raise UserError(f"{scheme} needs a package that is not installed: {fix}") from error
    if type(downloader) is LocalDownloader:  # litdata's fallback
        raise UserError(
            f"{scheme} is not an address that can be read: "
            "use a local folder, s3://, gs:// or hf://"
        )
    return downloader


def _explain(error: Exception, address: str) -> Exception:
    """Return FileNotFoundError for a missing file, and UserError or RunError for other failures."""
    if _is_missing(error):
        return FileNotFoundError(address)
    if isinstance(error, OSError) and error.errno in FULL_DISK_CODES:
        return RunError(
            f"the disk that caches {address} is full: free it, set LITDATA_CACHE_DIR to a larger "
            "disk, or set a smaller --data.cache_gb"
        )
    reason = first_line(error).rstrip(".")[:LONGEST_REASON]
    return UserError(
        f"{address} cannot be read ({type(error).__name__}: {reason}): "
        "check the address, the network and the credentials"
    )


def _is_missing(error: Exception) -> bool:
    """Whether the server answered that the file does not exist.

    Hugging Face's LocalEntryNotFoundError is a FileNotFoundError too, but means no connection.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict) and response.get("Error", {}).get("Code") in MISSING_CODES:
        return True
    return type(error) is FileNotFoundError or type(error).__name__ in MISSING_ERRORS
