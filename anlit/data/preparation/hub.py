"""Corpora and tokenizers on the Hugging Face hub: listed and fetched, at one commit.

huggingface_hub makes the requests, and repeats those that fail but for the first.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
from filelock import FileLock
from huggingface_hub import HfApi, RepoFile, constants, errors, get_session, hf_hub_download
from huggingface_hub.utils import disable_progress_bars

from anlit.data.preparation.sources import Listing, Source, SourceFile, file_sha256, natural
from anlit.data.storage.manifest import checked_path
from anlit.errors import UserError

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
CONTACT_SECONDS = 10.0
ASKING: dict[str, Any] = {"etag_timeout": CONTACT_SECONDS, "library_name": "anlit"}
ANSWER_SECONDS = 60.0  # huggingface_hub's listing has no time limit
LOCAL_COPY = "prepare from a local copy with --source DIR"
FAILURES = (
    *(
        httpx2.RequestError,
        errors.HfHubHTTPError,
        errors.EntryNotFoundError,
        errors.OfflineModeIsEnabled,
    ),
    *(
        TimeoutError,
        ValueError,
        KeyError,
        TypeError,
    ),  # the last three: of an answer that is a proxy's page
)


class HubFiles(Source):
    """Files of a dataset repository at one commit; in `patterns`, `*` stands for anything, folders too."""

    def __init__(
        self, repo_id: str, revision: str = "main", patterns: Sequence[str] = ("*",)
    ) -> None:
        if not REPOSITORY.fullmatch(repo_id):
            raise UserError(
                f"--repo {repo_id} is no dataset of the hub: give owner/name, such as allenai/c4."
            )
        self.repo_id, self.revision, self.patterns = repo_id, revision, patterns
        self.commit = revision if COMMIT.fullmatch(revision) else None
        self.settings = {"repository": repo_id, "revision": revision}

    def listing(self) -> Listing:
        get_session().timeout = ANSWER_SECONDS
        with self._plain_errors():
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
            raise UserError(
                f"The dataset {self.repo_id} has no file that matches {' or '.join(self.patterns)} in its revision "
                f"{self.revision}: set --revision to one that has, or {LOCAL_COPY}."
            )
        return Listing([files[name] for name in sorted(files, key=natural)])

    def _entries(self) -> list[RepoFile]:
        """The files of the folder that all patterns lie in; none if there is no such."""
        folder = os.path.commonpath(
            [re.split(r"[*?\[]", name)[0].rpartition("/")[0] for name in self.patterns]
        )
        where: dict[str, Any] = {"repo_type": "dataset", "revision": self.commit, "recursive": True}
        with suppress(errors.EntryNotFoundError):
            tree = HfApi().list_repo_tree(self.repo_id, folder or None, **where)
            return [entry for entry in tree if isinstance(entry, RepoFile)]
        return []

    def fetched(self, file: SourceFile, folder: Path) -> Path:
        """The file in `folder`, under a name of ours, where it may already be; other processes wait for its end."""
        target = self._place(file, folder)
        with FileLock(f"{target}.lock"):
            if target.is_file() and target.stat().st_size == file.size:
                return target
            with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as temporary:
                disable_progress_bars(
                    "huggingface_hub.http_get"
                )  # the preparation has a bar of its own
                where: dict[str, Any] = {
                    "repo_type": "dataset",
                    "revision": self.commit,
                    "local_dir": temporary,
                }
                with self._plain_errors():
                    arrived = Path(hf_hub_download(self.repo_id, file.name, **where, **ASKING))
                if arrived.stat().st_size == file.size and file.sha256 in (
                    None,
                    file_sha256(arrived),
                ):
                    return arrived.replace(target)
        raise UserError(
            f"{file.name} of the dataset {self.repo_id} arrived damaged (its size or its SHA-256 differs): repeat the "
            f"command, check the network and its proxies, or {LOCAL_COPY}."
        )

    def release(self, file: SourceFile, folder: Path) -> None:
        for path in (self._place(file, folder), Path(f"{self._place(file, folder)}.lock")):
            path.unlink(missing_ok=True)

    def _place(self, file: SourceFile, folder: Path) -> Path:
        return folder / f"source-{sha256(f'{self.commit} {file.name}'.encode()).hexdigest()[:32]}"

    def _plain_errors(self) -> AbstractContextManager[None]:
        return _plain_errors(f"the dataset {self.repo_id}", LOCAL_COPY, self.revision)


def fetch_tokenizer(repo_id: str) -> Path:
    """tokenizer.json of a model repository, in huggingface_hub's cache; UserError if it cannot be fetched."""
    with _plain_errors(f"the model {repo_id}", "give a local tokenizer.json with --tokenizer FILE"):
        return Path(hf_hub_download(repo_id, "tokenizer.json", **ASKING))


@contextmanager
def _plain_errors(what: str, remedy: str, revision: str = "main") -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise UserError(f"{_said(error, what, revision)}, or {remedy}.") from error


def _said(error: Exception, what: str, revision: str) -> str:
    login = "log in with `hf auth login` or set HF_TOKEN"
    response = error.response if isinstance(error, errors.HfHubHTTPError) else None
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, so {what} is not fetched: unset it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"The hub has {what}, but no revision {revision} of it: set --revision to one that it has"
    if isinstance(error, errors.GatedRepoError):
        return f"The hub asks for consent before it gives {what}: accept the terms on its page and {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"The hub has no {what[4:]}, or it is private: {login}"
    if response is not None:  # of the hub, or of the store that it sends to
        refused = f"{response.url.host} fails to give {what} (status {response.status_code})"
        return f"{refused}: try again later, check this machine's clock and proxies, {login}"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return f"{constants.ENDPOINT} cannot be reached for {what} ({reason}): check the network, HF_ENDPOINT and proxies"
