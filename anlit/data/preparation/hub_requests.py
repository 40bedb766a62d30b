"""Requests about one repository of the Hugging Face hub: repeated where that helps, refused in one sentence.

This module uses the session, the login and the error types of huggingface_hub, but not its downloads and listings:
its download starts a file again after a kill, and its listing (`list_repo_tree`) waits for a silent hub without a time
limit. The patience is our own: little at first contact, minutes once the hub has answered.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, parse_ratelimit_headers

from anlit.data.preparation.files import file_sha256
from anlit.data.preparation.workspace import say
from anlit.errors import UserError

T = TypeVar("T")
# Seconds to connect, for the next bytes, to send, for a free connection; before the hub has answered once, and later.
FIRST_TIMEOUT = (4.0, 6.0, 6.0, 6.0)
LATER_TIMEOUT = (10.0, 30.0, 30.0, 30.0)
FIRST_WAITS = (1.0,)  # seconds between attempts, and as many as there are attempts more
LATER_WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *[60.0] * 4)  # as long as the hub's limits on rates: 5 minutes
LONGEST_WAIT = 600.0  # seconds that the hub may ask for at once
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
REFUSED_LINK = (400, 401, 403)
"""What a store answers to a link whose signature has expired."""
LINK_ATTEMPTS = 4
FAILURES = (httpx2.RequestError, httpx2.InvalidURL, HfHubHTTPError, OfflineModeIsEnabled)
PARTIAL = ".incomplete"


class HubRepository:
    """A repository at one revision.

    Args:
        repo_id: "owner/name".
        revision: branch, tag or commit.
        endpoint: address of the hub; None means https://huggingface.co or what HF_ENDPOINT says.
    """

    kind = "model"
    alternative = "give a local tokenizer.json with --tokenizer FILE"

    def __init__(self, repo_id: str, revision: str = "main", endpoint: str | None = None) -> None:
        self.repo_id, self.revision = repo_id, revision
        self.address = (endpoint or constants.ENDPOINT).rstrip("/")
        self.answered = False

    def api(self, path: str) -> str:
        return f"{self.address}/api/{self.kind}s/{self.repo_id}/{path}"

    def file_url(self, name: str, revision: str) -> str:
        try:
            return hf_hub_url(self.repo_id, name, repo_type=self.kind, revision=revision, endpoint=self.address)
        except HFValidationError as error:
            raise UserError(self._sentence(error)) from error

    def read_json(self, url: str) -> tuple[Any, str | None]:
        """Content, and the address of the next page; ([], None) if the repository has no such folder.

        Raises:
            UserError: it cannot be had.
        """

        def ask() -> tuple[Any, str | None]:
            with self._get(url) as response:
                response.read()
                return response.json(), response.links.get("next", {}).get("url")

        try:
            return self._patiently(ask)
        except EntryNotFoundError:
            return [], None
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise self.foreign_answer() from error

    def foreign_answer(self) -> UserError:
        """The error for an answer that is not the hub's."""
        return UserError(f"{self.address} does not answer like the hub: check HF_ENDPOINT and proxies.")

    def fetch_file(self, url: str, target: Path, size: int | None, sha256: str | None) -> Path:
        """Make `target` the file at `url`, going on where an earlier attempt was cut, in this process or another.

        Raises:
            UserError: it cannot be had, or keeps arriving with another size or hash.
            OSError: it cannot be written.
        """
        if target.is_file() and size in (None, target.stat().st_size):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        for _ in range(2):
            self._patiently(lambda: self._continue(url, partial, size), lambda: _size(partial))
            wrong = _difference(partial, size, sha256)
            if wrong is None:
                return partial.replace(target)
            partial.unlink()
        raise UserError(
            f"{target.name} of the {self.kind} {self.repo_id} arrived damaged twice ({wrong}): "
            f"check the network and its proxies, or {self.alternative}."
        )

    def _continue(self, url: str, partial: Path, size: int | None) -> None:
        """Append what is missing to `partial`."""
        have = _size(partial)
        if have and have == size:
            return
        try:
            with self._get(url, f"bytes={have}-" if have else None) as response:
                # 206 is the rest of the file; a server that sends no parts answers 200 with all of it.
                mode = "ab" if response.status_code == 206 else "wb"
                with open(partial, mode) as file:
                    for piece in response.iter_bytes():
                        file.write(piece)
        except HfHubHTTPError as error:
            if error.response.status_code != 416 or not have:
                raise
            partial.unlink()  # it has all of the file already, or more; which of both cannot be told
            self._continue(url, partial, size)

    @contextmanager
    def _get(self, url: str, byte_range: str | None = None) -> Iterator[httpx2.Response]:
        headers = {**build_hf_headers(library_name="anlit"), "Accept-Encoding": "identity"}
        if byte_range is not None:
            headers["Range"] = byte_range
        timeout = LATER_TIMEOUT if self.answered else FIRST_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            hf_raise_for_status(response)
            yield response

    def _patiently(self, action: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Repeat `action` while its failures may pass; attempts that made progress do not count.

        Raises:
            EntryNotFoundError: there is no such file or folder.
            UserError: any other failure.
        """
        failures, before = 0, progress()
        while True:
            try:
                result = action()
            except EntryNotFoundError:
                raise
            except FAILURES as error:
                if progress() > before:
                    self.answered, failures, before = True, 0, progress()
                self.answered |= _status(error) == 429  # it is there, and busy
                waits = LATER_WAITS if self.answered else FIRST_WAITS
                if self._is_refused_link(error):
                    waits = waits[: LINK_ATTEMPTS - 1]  # each attempt asks the hub for a fresh link
                elif not _may_pass(error):
                    waits = ()
                if failures >= len(waits):
                    raise UserError(self._sentence(error)) from error
                seconds = max(waits[failures], _asked_to_wait(error))
                if seconds > 10:
                    say(f"{self.address} is busy (status {_status(error)}): asking again in {seconds:.0f} s.")
                time.sleep(seconds)
                failures += 1
            else:
                self.answered = True
                return result

    def _is_refused_link(self, error: Exception) -> bool:
        """Whether it is not the hub that refuses, but the store that it has sent us to."""
        if not isinstance(error, HfHubHTTPError) or _status(error) not in REFUSED_LINK:
            return False
        return error.response.url.netloc != httpx2.URL(self.address).netloc

    def _sentence(self, error: Exception) -> str:
        about = f"the {self.kind} {self.repo_id}"
        page = f"{self.address}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo_id}"
        login = "log in with `hf auth login` or set HF_TOKEN"
        otherwise = f"or {self.alternative}"
        status = _status(error)
        if self._is_refused_link(error):
            return (
                f"The store of {about} refuses the hub's links (status {status}): check this "
                f"machine's clock and proxies, try again later, {otherwise}."
            )
        match error:
            case OfflineModeIsEnabled():
                return f"HF_HUB_OFFLINE is set, so {about} is not fetched: unset it, {otherwise}."
            case HFValidationError():
                return f'"{self.repo_id}" is not the name of a {self.kind} on the hub, which is like "owner/name".'
            case GatedRepoError():
                return f"The hub asks for consent before it gives {about}: accept the terms on {page} and {login}, " + (
                    f"{otherwise}."
                )
            case RevisionNotFoundError():
                return f"The hub has {about}, but no revision {self.revision} of it: set --revision to one on {page}."
            case RepositoryNotFoundError() | HfHubHTTPError(response=httpx2.Response(status_code=404)):
                return f"The hub has no {about[4:]}, or it is private: check the name and {login}, {otherwise}."
            case HfHubHTTPError() if status in (401, 403):
                return f"The hub refuses {about} (status {status}): {login}, {otherwise}."
            case HfHubHTTPError():
                return f"The hub fails to give {about} (status {status}): try again later, {otherwise}."
        reason = str(error) or type(error).__name__
        return f"{self.address} cannot be reached for {about} ({reason}): check the network, {otherwise}."


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _asked_to_wait(error: Exception) -> float:
    """Seconds that the answer asks to wait, `LONGEST_WAIT` at most; 0 if it does not."""
    if not isinstance(error, HfHubHTTPError):
        return 0.0
    asked = error.response.headers.get("Retry-After", "").strip()
    limits = parse_ratelimit_headers(error.response.headers)
    seconds = float(asked) if asked.isdecimal() else float(limits.reset_in_seconds) if limits else 0.0
    return min(seconds, LONGEST_WAIT)


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in PASSING_STATUS
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)


def _difference(path: Path, size: int | None, sha256: str | None) -> str | None:
    """What is wrong with a fetched file."""
    found = _size(path)
    if size not in (None, found):
        return f"{found:,} bytes instead of {size:,}"
    if sha256 is not None:
        digest = file_sha256(path)
        if digest != sha256:
            return f"sha256 {digest} instead of {sha256}"
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
