"""A small hub on this machine: the requests that reading a corpus makes, over a folder laid out like the hub's.

FOLDER/datasets/OWNER/NAME/…, FOLDER/models/OWNER/NAME/…      each the files of one repository, one commit
"""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

from anlit.data.preparation import hub

PAGE_ENTRIES = 2  # the hub has 1000


@dataclass
class HubServer:
    """What the server serves, what it does wrong, and what it was asked."""

    folder: Path
    port: int = 0
    commit: str = "c0ffee" + 34 * "0"
    """Commit of the branch main, in all repositories."""
    refusal: tuple[int, str | None] | None = None
    """Status and X-Error-Code of every answer."""
    failing: int = 0
    """So many requests are answered with `refusal`, then all is well; 0: all."""
    store_refusals: int = 0
    """So many downloads are refused, as with a link that has expired."""
    drops: list[int] = field(default_factory=list)
    """The next downloads end after so many bytes."""
    held: threading.Event | None = None
    """A download that is to be dropped stands still until this is set."""
    damaged: int = 0
    """So many downloads have a wrong first byte."""
    names: list[str] = field(default_factory=list)
    """Names that every listing has besides."""
    asked: list[str] = field(default_factory=list)
    """Path of every request."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)


@contextmanager
def serving(folder: Path) -> Iterator[HubServer]:
    server = HubServer(folder)
    http = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": server}))
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@contextmanager
def alone_with(patch: pytest.MonkeyPatch, served: Path, folder: Path) -> Iterator[HubServer]:
    """The hub of `served`, as if HF_ENDPOINT named it; no waits, small pieces, and a cache in `folder`."""
    patch.setattr(hub, "WAITS", (0.0, 0.0, 0.0))
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with serving(served) as running:
        for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):  # what HF_ENDPOINT sets, before the package is loaded
            address = getattr(constants, name).replace(constants._HF_DEFAULT_ENDPOINT, running.endpoint)
            patch.setattr(constants, name, address)
        yield running
    close_session()


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.hub.asked.append(self.path)
        if self.hub.refusal is not None:
            refusal = self.hub.refusal
            self.hub.failing -= 1
            if self.hub.failing == 0:
                self.hub.refusal = None
            return self.refuse(*refusal)
        for pattern, answer in (
            (r"/api/(datasets|models)/([^/]+/[^/]+)/revision/([^/]+)", self.revision),
            (r"/api/(datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self.tree),
            (r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
            (r"/blob/(.+)", self.blob),
        ):
            if found := re.fullmatch(pattern, url.path):
                return answer(*(group and unquote(group) for group in found.groups()))
        return self.refuse(404, None)

    def repository(self, kind: str | None, repo_id: str, revision: str) -> Path | None:
        """Folder of a repository; None after a refusal."""
        folder = self.hub.folder / (kind or "models") / repo_id
        if not folder.is_dir():
            self.refuse(401, "RepoNotFound")
        elif revision not in ("main", self.hub.commit):
            self.refuse(404, "RevisionNotFound")
        else:
            return folder
        return None

    def revision(self, kind: str, repo_id: str, revision: str) -> None:
        if self.repository(kind, repo_id, revision):
            self.answer(json.dumps({"id": repo_id, "sha": self.hub.commit}).encode())

    def tree(self, kind: str, repo_id: str, revision: str, below: str | None) -> None:
        root = self.repository(kind, repo_id, revision)
        if root is None:
            return None
        if not (root / (below or ".")).is_dir():
            return self.refuse(404, "EntryNotFound")
        first = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        entries = [self.entry(root, path) for path in sorted((root / (below or ".")).rglob("*"), reverse=True)]
        entries += [{"type": "file", "oid": "0" * 40, "size": 5, "path": name} for name in self.hub.names]
        headers = {}
        if first + PAGE_ENTRIES < len(entries):
            following = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={first + PAGE_ENTRIES}"
            headers["Link"] = f'<{following}>; rel="next"'
        return self.answer(json.dumps(entries[first : first + PAGE_ENTRIES]).encode(), headers)

    def entry(self, root: Path, path: Path) -> dict[str, Any]:
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        entry = {"type": "file", "oid": "0" * 40, "size": path.stat().st_size, "path": name}
        if path.suffix != ".md":
            entry["lfs"] = {"oid": sha256_of(path), "size": path.stat().st_size, "pointerSize": 130}
        return entry

    def resolve(self, kind: str | None, repo_id: str, revision: str, name: str) -> None:
        """Where the bytes are: on another host, as on the hub."""
        root = self.repository(kind, repo_id, revision)
        if root is None:
            return
        if not (root / name).is_file():
            return self.refuse(404, "EntryNotFound")
        relative = (root / name).relative_to(self.hub.folder).as_posix()
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.hub.port}/blob/{relative}?signature=1")
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.send_header("X-Linked-ETag", sha256_of(root / name))
        self.send_header("X-Linked-Size", str((root / name).stat().st_size))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def blob(self, relative: str) -> None:
        content = (self.hub.folder / relative).read_bytes()
        if self.hub.store_refusals and not self.hub.drops:
            self.hub.store_refusals -= 1
            return self.refuse(403, None)
        if self.hub.damaged:
            self.hub.damaged -= 1
            content = b"?" + content[1:]
        size, status, headers = len(content), 200, {}
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            first, last = int(wanted[1]), int(wanted[2] or size - 1)
            if first >= size:
                return self.refuse(416, None)
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self.answer(content, headers, status, self.hub.drops.pop(0) if self.hub.drops else None)

    def answer(
        self, content: bytes, headers: dict[str, str] | None = None, status: int = 200, sent: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])
        self.wfile.flush()
        if sent is not None:
            if self.hub.held is not None:
                self.hub.held.wait(20)
            self.close_connection = True

    def refuse(self, status: int, code: str | None) -> None:
        self.answer(b"{}", {"X-Error-Code": code} if code else {}, status)
