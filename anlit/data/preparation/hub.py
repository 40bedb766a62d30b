"""Corpora and tokenizers on the Hugging Face hub: listed and fetched, at one commit.

huggingface_hub makes the requests. It repeats requests that fail, except the first.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, RepoFile, constants, errors, get_session, hf_hub_download
from huggingface_hub.utils import disable_progress_bars

from anlit.data.preparation.sources import (
    CorpusFiles,
    Listing,
    SourceFile,
    file_sha256,
    natural_order,
)
from anlit.data.storage.manifest import checked_path
from anlit.errors import UserError, first_line

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
CONTACT_SECONDS = 10.0
"""Time to connect to the hub."""
LISTING_SECONDS = 60.0
"""Time for an answer while a repository is listed, where huggingface_hub has no limit."""
DOWNLOAD_OPTIONS: dict[str, Any] = {"etag_timeout": CONTACT_SECONDS, "library_name": "anlit"}
LOCAL_COPY = "prepare from a local copy with --source DIR"
REQUEST_ERRORS = (
    httpx2.RequestError,
    errors.HfHubHTTPError,
    errors.EntryNotFoundError,
    errors.OfflineModeIsEnabled,
    TimeoutError,
)
ANSWER_ERRORS = (ValueError, KeyError, TypeError)
"""What huggingface_hub raises if the answer is the page of a proxy."""


class HubFiles(CorpusFiles):
    """Files of a data set's repository at one commit. In `patterns`, `*` also matches folders."""

    def __init__(
        self, repo_id: str, revision: str = "main", patterns: Sequence[str] = ("*",)
    ) -> None:
        if not REPOSITORY.fullmatch(repo_id):
            raise UserError(
                f"--repo {repo_id} is not a dataset of the hub: give owner/name, such as allenai/c4"
            )
        self.repo_id = repo_id
        self.revision = revision
        self.patterns = patterns
        self.commit = revision if COMMIT.fullmatch(revision) else None
        self.settings = {"repository": repo_id, "revision": revision}
        self.description = f"the dataset {repo_id}"

    def listing(self) -> Listing:
        get_session().timeout = LISTING_SECONDS
        with _hub_errors(self.description, LOCAL_COPY, self.revision):
            if self.commit is None:
                info = HfApi().dataset_info(
                    self.repo_id, revision=self.revision, timeout=CONTACT_SECONDS
                )
                if not COMMIT.fullmatch(str(info.sha)):
                    raise ValueError(f"its commit is {info.sha!r:.50}")
                self.commit = info.sha
            entries = self._entries()
        files = {}
        for entry in entries:
            if any(fnmatchcase(entry.path, pattern) for pattern in self.patterns):
                name = checked_path(entry.path, f"The hub's listing of {self.repo_id}")
                # Small files are in git itself and have no hash.
                files[name] = SourceFile(name, entry.size, entry.lfs.sha256 if entry.lfs else None)
        if not files:
            patterns = " or ".join(self.patterns)
            raise UserError(
                f"The dataset {self.repo_id} has no file that matches {patterns} in its revision "
                f"{self.revision}: set --revision to another, or {LOCAL_COPY}"
            )
        return Listing([files[name] for name in sorted(files, key=natural_order)])

    def _entries(self) -> list[RepoFile]:
        """Return the files of the folder that all patterns share. None if it is missing."""
        fixed = [re.split(r"[*?\[]", pattern)[0] for pattern in self.patterns]
        folder = os.path.commonpath([path.rpartition("/")[0] for path in fixed])
        with suppress(errors.EntryNotFoundError):
            tree = HfApi().list_repo_tree(
                self.repo_id,
                folder or None,
                repo_type="dataset",
                revision=self.commit,
                recursive=True,
            )
            return [entry for entry in tree if isinstance(entry, RepoFile)]
        return []

    def fetch(self, file: SourceFile, folder: Path) -> Path:
        """Return the copy of a file in `folder`. Download it if it is missing.

        Other processes wait until the download ends.
        """
        target = self._target(file, folder)
        with FileLock(f"{target}.lock"):
            if target.is_file() and target.stat().st_size == file.size:
                return target
            with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as temporary:
                copy = self._download(file, temporary)
                has_size = copy.stat().st_size == file.size
                if has_size and file.sha256 in (None, file_sha256(copy)):
                    return copy.replace(target)
        raise UserError(
            f"{file.name} of the dataset {self.repo_id} arrived damaged (its size or its SHA-256 "
            f"differs): repeat the command, check the network and its proxies, or {LOCAL_COPY}"
        )

    def _download(self, file: SourceFile, folder: str) -> Path:
        disable_progress_bars("huggingface_hub.http_get")  # the preparation shows its progress
        with _hub_errors(self.description, LOCAL_COPY, self.revision):
            path = hf_hub_download(
                self.repo_id,
                file.name,
                repo_type="dataset",
                revision=self.commit,
                local_dir=folder,
                **DOWNLOAD_OPTIONS,
            )
        return Path(path)

    def release(self, file: SourceFile, folder: Path) -> None:
        target = self._target(file, folder)
        target.unlink(missing_ok=True)
        Path(f"{target}.lock").unlink(missing_ok=True)

    def _target(self, file: SourceFile, folder: Path) -> Path:
        name_hash = sha256(f"{self.commit} {file.name}".encode()).hexdigest()
        return folder / f"source-{name_hash[:32]}"


def fetch_tokenizer(repo_id: str) -> Path:
    """Return tokenizer.json of a model repository from huggingface_hub's cache, or fetch it."""
    with _hub_errors(
        f"the model {repo_id}",
        "give a local tokenizer.json with --tokenizer (--data.tokenizer) FILE",
    ):
        return Path(hf_hub_download(repo_id, "tokenizer.json", **DOWNLOAD_OPTIONS))


@contextmanager
def _hub_errors(repository: str, remedy: str, revision: str = "main") -> Iterator[None]:
    """Turn an error of huggingface_hub into UserError, with `remedy` as the last advice."""
    try:
        yield
    except (*REQUEST_ERRORS, *ANSWER_ERRORS) as error:
        raise UserError(f"{_explain(error, repository, revision)}, or {remedy}") from error


def _explain(error: Exception, repository: str, revision: str) -> str:
    """Return cause and fix of an error for `repository`, such as "the dataset allenai/c4"."""
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so {repository} is not fetched: unset it"
    reason = type(error).__name__
    if isinstance(error, errors.HfHubHTTPError):  # of the hub, or of the store that it sends to
        host = error.response.url.host
        return (
            f"{host} refuses {repository} in revision {revision} ({reason}, status "
            f"{error.response.status_code}): check the name, the revision and this machine's "
            "clock, accept the terms on its page, and log in with `hf auth login` or HF_TOKEN, or "
            "try again later"
        )
    return (
        f"{constants.ENDPOINT} cannot be reached for {repository} ({first_line(error)}): "
        "check the network, HF_ENDPOINT and proxies"
    )
