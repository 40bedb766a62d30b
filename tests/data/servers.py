"""Two small servers of files on this machine, which can be told to fail: one in S3's way, one in the hub's."""

import hashlib
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

from anlit.data.preparation import hub

PAGE_ENTRIES = 2  # the hub has 1000
COMMIT = "c0ffee" + 34 * "0"  # of the branch main, in all repositories


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.root, self.address = root, f"http://127.0.0.1:{self.server_address[1]}"
        self.behave()

    def behave(self) -> None:
        """Fail in no way, and forget what was asked for."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)

    class Handler(BaseHTTPRequestHandler):
        server: Any
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def log_message(self, *args: Any) -> None:
            """Nothing on the terminal."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, content: bytes, status: int = 200, headers: Any = None, sent: int = 1 << 40) -> None:
            """Send the content or the range of it that is asked for; after `sent` bytes the connection ends."""
            headers = dict(headers or {})
            if status == 200 and (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")):
                first, last, size = int(part[1]), int(part[2] or len(content) - 1), len(content)
                content, status = content[first : last + 1], 206
                headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content[:sent])
            self.wfile.flush()
            self.close_connection = self.close_connection or sent < len(content)


S = TypeVar("S", bound=_Server)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """The server, running in a thread."""
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.silent = False
        server.shutdown()
        server.server_close()


class ObjectStore(_Server):
    """Serves `root`/<bucket>/<key> as S3 does."""

    def behave(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # how often each (method, path) was asked for
        self.status = 200  # what to answer; anything else than 200 for everything
        self.silent = False  # accept connections and say nothing
        self.damage: Counter[str] = Counter()  # path → how many times to serve it with a flipped bit

    def fetched(self, name: str) -> int:
        """How often files of this kind of name were asked for."""
        return sum(n for (method, path), n in self.requests.items() if method == "GET" and name in path)

    class Handler(_Server.Handler):
        def do_GET(self) -> None:
            store, path = self.server, self.path.split("?")[0]
            store.requests[self.command, path] += 1
            while store.silent:
                time.sleep(0.05)
            file = store.root / path.lstrip("/")
            if store.status != 200 or not file.is_file():
                status = store.status if store.status != 200 else 404
                code = {403: "AccessDenied", 404: "NoSuchKey"}.get(status, "InternalError")
                return self.answer(f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode(), status)
            content = bytearray(file.read_bytes())
            if self.command == "GET" and store.damage[path]:
                store.damage[path] -= 1
                content[len(content) // 2] ^= 1
            dated = {"Last-Modified": "Fri, 20 Nov 2026 00:00:00 GMT", "ETag": '"0"'}
            return self.answer(bytes(content), headers=dated)


class Hub(_Server):
    """Serves the repositories `root`/datasets/OWNER/NAME and `root`/models/OWNER/NAME, each with one commit."""

    def behave(self) -> None:
        self.refusal: tuple[int, str] | None = None  # status and X-Error-Code of every answer
        self.failing = 0  # so many requests are answered with `refusal`, then all is well; 0: all
        self.store_refusals = 0  # so many downloads are refused, as with a link that has expired
        self.drops: list[int] = []  # the next downloads end after so many bytes
        self.damaged = 0  # so many downloads have a wrong first byte
        self.names: list[str] = []  # names that every listing has besides
        self.asked: list[str] = []  # path of every request

    class Handler(_Server.Handler):
        def refuse(self, status: int, code: str = "") -> None:
            self.answer(b"{}", status, {"X-Error-Code": code} if code else {})

        def do_GET(self) -> None:
            self.server.asked.append(self.path)
            if (refusal := self.server.refusal) is not None:
                self.server.failing -= 1
                if self.server.failing == 0:
                    self.server.refusal = None
                return self.refuse(*refusal)
            for pattern, answer in (
                (r"/api/(datasets|models)/([^/]+/[^/]+)/revision/([^/]+)", self.revision),
                (r"/api/(datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self.tree),
                (r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
            ):
                if match := re.fullmatch(pattern, urlsplit(self.path).path):
                    kind, repo_id, revision, *others = (group and unquote(group) for group in match.groups())
                    root = self.server.root / (kind or "models") / repo_id
                    if not root.is_dir():
                        return self.refuse(401, "RepoNotFound")
                    if revision not in ("main", COMMIT):
                        return self.refuse(404, "RevisionNotFound")
                    return answer(root, *others)
            return self.blob(urlsplit(self.path).path.removeprefix("/blob/"))

        def revision(self, root: Path) -> None:
            self.answer(json.dumps({"id": root.name, "sha": COMMIT}).encode())

        def tree(self, root: Path, below: str | None) -> None:
            if not (root / (below or ".")).is_dir():
                return self.refuse(404, "EntryNotFound")
            first = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
            entries = [_entry(root, path) for path in sorted((root / (below or ".")).rglob("*"), reverse=True)]
            entries += [{"type": "file", "oid": "0" * 40, "size": 5, "path": name} for name in self.server.names]
            page, link = entries[first : first + PAGE_ENTRIES], {}
            if first + PAGE_ENTRIES < len(entries):
                own = f"{self.server.address}{urlsplit(self.path).path}?recursive=true&cursor={first + PAGE_ENTRIES}"
                link = {"Link": f'<{own}>; rel="next"'}
            return self.answer(json.dumps(page).encode(), headers=link)

        def resolve(self, root: Path, name: str) -> None:
            """Where the bytes are: on another host, as on the hub."""
            if not (root / name).is_file():
                return self.refuse(404, "EntryNotFound")
            store = self.server.address.replace("127.0.0.1", "localhost")
            headers = {
                "Location": f"{store}/blob/{(root / name).relative_to(self.server.root).as_posix()}?signature=1",
                "X-Repo-Commit": COMMIT,
                "X-Linked-ETag": _sha256(root / name),
                "X-Linked-Size": str((root / name).stat().st_size),
            }
            return self.answer(b"", 302, headers)

        def blob(self, relative: str) -> None:
            server, content = self.server, (self.server.root / relative).read_bytes()
            if server.store_refusals:
                server.store_refusals -= 1
                return self.refuse(403)
            if server.damaged:
                server.damaged -= 1
                content = b"?" + content[1:]
            return self.answer(content, sent=server.drops.pop(0) if server.drops else len(content))


def _entry(root: Path, path: Path) -> dict[str, Any]:
    entry = {"type": "directory", "oid": "0" * 40, "size": 0, "path": path.relative_to(root).as_posix()}
    if path.is_file():
        entry |= {"type": "file", "size": path.stat().st_size}
        if path.suffix != ".md":
            entry["lfs"] = {"oid": _sha256(path), "size": path.stat().st_size, "pointerSize": 130}
    return entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serving_hub(patch: pytest.MonkeyPatch, root: Path, cache: Path) -> Iterator[Hub]:
    """The hub of `root`, as if HF_ENDPOINT named it; no waits, small pieces, and a cache of its own."""
    patch.setattr(hub, "WAITS", (0.0, 0.0, 0.0))
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = Hub(root)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):  # what HF_ENDPOINT sets, before the package is loaded
        patch.setattr(constants, name, getattr(constants, name).replace(constants._HF_DEFAULT_ENDPOINT, server.address))
    with serving(server):
        yield server
    close_session()
