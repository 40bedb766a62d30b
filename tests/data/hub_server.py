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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

from anlit.data.preparation import hub

PAGE_ENTRIES = 2  # the hub has 1000
COMMIT = "c0ffee" + 34 * "0"  # of the branch main, in all repositories


class HubServer(ThreadingHTTPServer):
    """What the server serves, what it does wrong, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.port = folder, self.server_address[1]
        self.refusal: tuple[int, str | None] | None = None
        """Status and X-Error-Code of every answer."""
        self.failing = 0
        """So many requests are answered with `refusal`, then all is well; 0: all."""
        self.store_refusals = 0
        """So many downloads are refused, as with a link that has expired."""
        self.drops: list[int] = []
        """The next downloads end after so many bytes."""
        self.held: threading.Event | None = None
        """A download that is to be dropped stands still until this is set."""
        self.damaged = 0
        """So many downloads have a wrong first byte."""
        self.names: list[str] = []
        """Names that every listing has besides."""
        self.asked: list[str] = []
        """Path of every request."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)


@contextmanager
def serving(patch: pytest.MonkeyPatch, folder: Path, cache: Path) -> Iterator[HubServer]:
    """The hub of `folder`, as if HF_ENDPOINT named it; no waits, small pieces, and a cache of its own."""
    patch.setattr(hub, "WAITS", (0.0, 0.0, 0.0))
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = HubServer(folder)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):  # what HF_ENDPOINT sets, before the package is loaded
        endpoint = getattr(constants, name).replace(constants._HF_DEFAULT_ENDPOINT, f"http://127.0.0.1:{server.port}")
        patch.setattr(constants, name, endpoint)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
    close_session()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if (refusal := self.server.refusal) is not None:
            self.server.failing -= 1
            if self.server.failing == 0:
                self.server.refusal = None
            return self.answer(b"{}", *refusal)
        for pattern, answer in (
            (r"/api/(datasets|models)/([^/]+/[^/]+)/revision/([^/]+)", self.revision),
            (r"/api/(datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self.tree),
            (r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        ):
            if match := re.fullmatch(pattern, urlsplit(self.path).path):
                kind, repo_id, revision, *others = (group and unquote(group) for group in match.groups())
                root = self.server.folder / (kind or "models") / repo_id
                if not root.is_dir():
                    return self.answer(b"{}", 401, "RepoNotFound")
                if revision not in ("main", COMMIT):
                    return self.answer(b"{}", 404, "RevisionNotFound")
                return answer(root, *others)
        return self.blob(urlsplit(self.path).path.removeprefix("/blob/"))

    def revision(self, root: Path) -> None:
        self.answer(json.dumps({"id": root.name, "sha": COMMIT}).encode())

    def tree(self, root: Path, below: str | None) -> None:
        if not (root / (below or ".")).is_dir():
            return self.answer(b"{}", 404, "EntryNotFound")
        first = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        entries = [_entry(root, path) for path in sorted((root / (below or ".")).rglob("*"), reverse=True)]
        entries += [{"type": "file", "oid": "0" * 40, "size": 5, "path": name} for name in self.server.names]
        page, headers = entries[first : first + PAGE_ENTRIES], {}
        if first + PAGE_ENTRIES < len(entries):
            own = f"http://127.0.0.1:{self.server.port}{urlsplit(self.path).path}"
            headers["Link"] = f'<{own}?recursive=true&cursor={first + PAGE_ENTRIES}>; rel="next"'
        return self.answer(json.dumps(page).encode(), headers=headers)

    def resolve(self, root: Path, name: str) -> None:
        """Where the bytes are: on another host, as on the hub."""
        if not (root / name).is_file():
            return self.answer(b"{}", 404, "EntryNotFound")
        relative = (root / name).relative_to(self.server.folder).as_posix()
        headers = {
            "Location": f"http://localhost:{self.server.port}/blob/{relative}?signature=1",
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": _sha256(root / name),
            "X-Linked-Size": str((root / name).stat().st_size),
        }
        return self.answer(b"", 302, headers=headers)

    def blob(self, relative: str) -> None:
        server, content = self.server, (self.server.folder / relative).read_bytes()
        if server.store_refusals and not server.drops:
            server.store_refusals -= 1
            return self.answer(b"{}", 403)
        if server.damaged:
            server.damaged -= 1
            content = b"?" + content[1:]
        status, headers, size = 200, {}, len(content)
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
            first, last = int(part[1]), int(part[2] or size - 1)
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return self.answer(content, status, headers=headers, sent=server.drops.pop(0) if server.drops else None)

    def answer(
        self, content: bytes, status: int = 200, code: str | None = None, headers: Any = None, sent: int | None = None
    ) -> None:
        """Send an answer with an X-Error-Code, or only the first bytes of it."""
        self.send_response(status)
        headers = {**(headers or {}), **({"X-Error-Code": code} if code else {}), "Content-Length": str(len(content))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent])
        self.wfile.flush()
        if sent is not None:
            if self.server.held is not None:
                self.server.held.wait(20)
            self.close_connection = True


def _entry(root: Path, path: Path) -> dict[str, Any]:
    entry = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path.relative_to(root).as_posix()}
    if path.is_file():
        entry |= {"type": "file", "size": path.stat().st_size}
        if path.suffix != ".md":
            entry["lfs"] = {"oid": _sha256(path), "size": path.stat().st_size, "pointerSize": 130}
    return entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
