"""Corpora and tokenizers on the Hugging Face hub: listed and fetched, at one commit.

huggingface_hub makes the requests. Two things are our own. A download that was killed continues inside the file, where
huggingface_hub would start again. Failed requests are repeated: once until the hub has answered, for minutes
afterwards.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi, RepoFile, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from anlit.data.preparation.sources import Listing, Source, SourceFile, file_sha256, natural
from anlit.data.preparation.workers import in_thread
from anlit.data.storage.names import checked_path, path_inside
from anlit.errors import UserError
from anlit.reporting.text import say

T = TypeVar("T")
COMMIT = re.compile(r"[0-9a-f]{40}")
CONTACT_SECONDS = 10.0
LISTING_SECONDS = 600.0  # huggingface_hub's listing has no time limit
FIRST_WAITS = (1.0,)  # seconds between attempts, and as many as there are attempts more
LATER_WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *[60.0] * 4)  # as long as the hub's limits on rates: 5 minutes
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
REFUSED_LINK = (400, 401, 403)
"""What a store answers to a link whose signature has expired. The next attempt asks the hub for a fresh one."""
FAILURES = (httpx2.RequestError, HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled, TimeoutError,
            ValueError, KeyError, TypeError)  # fmt: skip
"""The last three come from answers that are not the hub's, such as a proxy's page."""


class HubFiles(Source):
    """Files of a dataset repository at one commit, fetched one by one and removed when their tokens are written.

    Args:
        repo_id: "owner/name".
        revision: branch, tag or commit; what a branch stands for is looked up once.
        patterns: of the wanted files; `*` stands for anything, folders too.
    """

    def __init__(self, repo_id: str, revision: str = "main", patterns: Sequence[str] = ("*",)) -> None:
        self.repo_id, self.revision, self.patterns = repo_id, revision, patterns
        self._commit: str | None = revision if COMMIT.fullmatch(revision) else None
        self._answered = False
        disable_progress_bars("huggingface_hub.http_get")  # the preparation has a bar of its own

    @property
    def commit(self) -> str:
        """The 40 hex digits of the revision.

        Raises:
            UserError: the hub, the repository or the revision cannot be reached.
        """
        if self._commit is None:
            self._commit = self._patiently(self._look_up)
        return self._commit

    def _look_up(self) -> str:
        info = HfApi(_address()).dataset_info(self.repo_id, revision=self.revision, timeout=CONTACT_SECONDS)
        if not COMMIT.fullmatch(str(info.sha)):  # it becomes the name of a folder
            raise ValueError(f"its commit is {info.sha!r:.50}")
        return str(info.sha)

    def pinned(self) -> dict[str, Any]:
        return {"commit": self.commit}

    def pin(self, pinned: dict[str, Any]) -> None:
        self._commit = pinned["commit"]

    def settings(self) -> dict[str, Any]:
        return {"repository": self.repo_id, "revision": self.revision}

    def listing(self) -> Listing:
        self.commit  # noqa: B018  the first contact, which must not take long
        found = {}
        for entry in self._patiently(lambda: in_thread(self._entries).result(LISTING_SECONDS)):
            if any(fnmatchcase(entry.path, pattern) for pattern in self.patterns):
                name = checked_path(entry.path, f"The hub's listing of {self.repo_id}")
                sha256 = entry.lfs and entry.lfs.sha256  # small files are in git itself and have none
                found[name] = SourceFile(name, entry.size, sha256)
        if not found:
            raise UserError(
                f"The dataset {self.repo_id} has no file that matches {' or '.join(self.patterns)} in its revision "
                f"{self.revision}: set --revision to one that has, or prepare from a local copy with --source DIR."
            )
        return Listing([found[name] for name in sorted(found, key=natural)])

    def _entries(self) -> list[RepoFile]:
        """The files of the folders that the patterns lie in."""
        found: list[RepoFile] = []
        for folder in sorted({re.split(r"[*?]", pattern)[0].rpartition("/")[0] for pattern in self.patterns}):
            where: dict[str, Any] = {"repo_type": "dataset", "revision": self.commit, "recursive": True}
            with suppress(EntryNotFoundError):  # no such folder
                tree = HfApi(_address()).list_repo_tree(self.repo_id, folder or None, **where)
                found += [entry for entry in tree if isinstance(entry, RepoFile)]
        return found

    def provide(self, file: SourceFile, folder: Path) -> Path:
        """The file in `folder`, where it may already be; what an earlier attempt left is continued.

        Raises:
            UserError: the hub cannot be reached, the file is not there, or it keeps arriving damaged.
            OSError: `folder` cannot be written to.
        """
        target = self._place(file, folder)
        if target.is_file() and target.stat().st_size == file.size:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.incomplete")
        wrong: str | None = None
        for _ in range(2):
            self._patiently(lambda: self._continue(file, partial))
            wrong = _difference(partial, file)
            if wrong is None:
                return partial.replace(target)
            partial.unlink()
        raise UserError(
            f"{target.name} of the dataset {self.repo_id} arrived damaged twice ({wrong}): check the network and its "
            "proxies, or prepare from a local copy with --source DIR."
        )

    def _continue(self, file: SourceFile, partial: Path) -> None:
        """Append what is missing to `partial`."""
        url = hf_hub_url(self.repo_id, file.name, repo_type="dataset", revision=self.commit)
        with partial.open("ab") as opened:
            if opened.tell() > file.size:
                opened.truncate(0)
            if (have := opened.seek(0, 2)) < file.size:
                http_get(url, opened, resume_size=have, headers=build_hf_headers(library_name="anlit"))

    def release(self, file: SourceFile, folder: Path) -> None:
        self._place(file, folder).unlink(missing_ok=True)

    def _place(self, file: SourceFile, folder: Path) -> Path:
        return path_inside(folder / self.commit, checked_path(file.name, "The plan"))

    def _patiently(self, action: Callable[[], T]) -> T:
        """Repeat `action` while its failures may pass.

        Raises:
            UserError: a failure that stays.
        """
        failures = 0
        while True:
            try:
                result = action()
            except FAILURES as error:
                self._answered |= _status(error) == 429  # it is there, and busy
                waits = LATER_WAITS if self._answered else FIRST_WAITS
                if failures >= len(waits) or not _may_pass(error):
                    remedy = "prepare from a local copy with --source DIR"
                    raise _refused(error, f"the dataset {self.repo_id}", self.revision, remedy) from error
                if waits[failures] > 10:
                    say(f"{_address()} is busy (status {_status(error)}): asking again in {waits[failures]:.0f} s.")
                time.sleep(waits[failures])
                failures += 1
            else:
                self._answered = True
                return result


def fetch_tokenizer(repo_id: str) -> Path:
    """tokenizer.json of a model repository, in huggingface_hub's cache.

    Raises:
        UserError: it is not there and cannot be fetched.
        OSError: the cache cannot be written to.
    """
    try:
        return Path(hf_hub_download(repo_id, "tokenizer.json", etag_timeout=CONTACT_SECONDS, library_name="anlit"))
    except FAILURES as error:
        remedy = "give a local tokenizer.json with --tokenizer FILE"
        raise _refused(error, f"the model {repo_id}", "main", remedy) from error


def _address() -> str:
    return constants.ENDPOINT.rstrip("/")


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _is_refused_link(error: Exception) -> bool:
    """Whether it is not the hub that refuses, but the store that it has sent us to."""
    if not isinstance(error, HfHubHTTPError) or _status(error) not in REFUSED_LINK:
        return False
    return error.response.url.netloc != httpx2.URL(_address()).netloc


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return _status(error) in PASSING_STATUS or _is_refused_link(error)
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)


def _refused(error: Exception, what: str, revision: str, remedy: str) -> UserError:
    """The error in one sentence."""
    login = f"log in with `hf auth login` or set HF_TOKEN, or {remedy}"
    status = _status(error)
    if constants.HF_HUB_OFFLINE:
        return UserError(f"HF_HUB_OFFLINE is set, so {what} is not fetched: unset it, or {remedy}.")
    if isinstance(error, EntryNotFoundError) and status is not None:
        return UserError(f"The hub has {what}, but not all of its files: {remedy}.")
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"The hub has {what}, but no revision {revision} of it: set --revision to one that it has.")
    if _is_refused_link(error):
        clock = "check this machine's clock and proxies, try again later"
        return UserError(f"The store of {what} refuses the hub's links (status {status}): {clock}, or {remedy}.")
    if isinstance(error, GatedRepoError):
        return UserError(f"The hub asks for consent before it gives {what}: accept the terms on its page and {login}.")
    if status in (401, 403, 404):
        return UserError(f"The hub has no {what[4:]}, or it is private (status {status}): {login}.")
    if status is not None:
        return UserError(f"The hub fails to give {what} (status {status}): try again later, or {remedy}.")
    reason = (str(error) or type(error).__name__).splitlines()[0]
    check = "check the network, HF_ENDPOINT and proxies"
    return UserError(f"{_address()} cannot be reached for {what} ({reason}): {check}, or {remedy}.")


def _difference(path: Path, file: SourceFile) -> str | None:
    """What is wrong with a fetched file."""
    if (size := path.stat().st_size) != file.size:
        return f"{size:,} bytes instead of {file.size:,}"
    if file.sha256 is not None and (digest := file_sha256(path)) != file.sha256:
        return f"sha256 {digest} instead of {file.sha256}"
    return None
