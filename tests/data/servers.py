"""Two small servers of files on this machine, which can be told to fail: one in S3's way, one in the hub's."""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

COMMIT = "c0ffee" + 34 * "0"  # of the branch main, in all repositories


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.root, self.address = root, f"http://127.0.0.1:{self.server_address[1]}"
        self.behave()

    def behave(self) -> None:
        """Fail in no way, and forget what was asked for."""

    class Handler(BaseHTTPRequestHandler):
        server: Any
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def log_message(self, *args: Any) -> None:
            """Nothing on the terminal."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, content: bytes, status: int = 200, headers: Any = ()) -> None:
            self.send_response(status)
            for name, value in {**dict(headers), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)
            self.wfile.flush()


S = TypeVar("S", bound=_Server)


@contextmanager
def serving(server: S) -> Iterator[S]:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.silent = False
        server.shutdown()
        server.server_close()


class ObjectStore(_Server):
    def behave(self) -> None:
        self.requests: Counter[tuple[str, str]] = (
            Counter()
        )  # how often each (method, path) was asked for
        self.status = 200  # what to answer; anything else than 200 for everything
        self.silent = False  # accept connections and say nothing
        self.damage: Counter[str] = (
            Counter()
        )  # path → how many times to serve it with a flipped bit

    def fetched(self, name: str) -> int:
        """How often files of this kind of name were asked for."""
        return sum(
            n for (method, path), n in self.requests.items() if method == "GET" and name in path
        )

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
                return self.answer(
                    f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode(), status
                )
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
        self.damaged = 0  # so many downloads have a wrong first byte
        self.names: list[str] = []  # names that every listing has besides
        self.asked: list[str] = []  # path of every request

    class Handler(_Server.Handler):
        def refuse(self, status: int, code: str = "") -> None:
            self.answer(b"{}", status, {"X-Error-Code": code} if code else {})

        def do_GET(self) -> None:
            self.server.asked.append(self.path)
            if (refusal := self.server.refusal) is not None:
                return self.refuse(*refusal)
            for pattern, answer in (
                (r"/api/(datasets|models)/([^/]+/[^/]+)/revision/([^/]+)", self.revision),
                (r"/api/(datasets|models)/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", self.tree),
                (r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
            ):
                if match := re.fullmatch(pattern, urlsplit(self.path).path):
                    kind, repo_id, revision, *others = (
                        group and unquote(group) for group in match.groups()
                    )
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
            entries = [
                _entry(root, path)
                for path in sorted((root / (below or ".")).rglob("*"), reverse=True)
            ]
            entries += [
                {"type": "file", "oid": "0" * 40, "size": 5, "path": name}
                for name in self.server.names
            ]
            return self.answer(json.dumps(entries).encode())

        def resolve(self, root: Path, name: str) -> None:
            """Where the bytes are: on another host, as on the hub."""
            if not (root / name).is_file():
                return self.refuse(404, "EntryNotFound")
            store = self.server.address.replace("127.0.0.1", "localhost")
            headers = {
                "Location": f"{store}/blob/{(root / name).relative_to(self.server.root).as_posix()}?signature=1",
                "X-Linked-Size": str((root / name).stat().st_size),
                "X-Repo-Commit": COMMIT, "X-Linked-ETag": _sha256(root / name),
            }  # fmt: skip
            return self.answer(b"", 302, headers)

        def blob(self, relative: str) -> None:
            server, content = self.server, (self.server.root / relative).read_bytes()
            if server.damaged:
                server.damaged -= 1
                content = b"?" + content[1:]
            return self.answer(content)


def _entry(root: Path, path: Path) -> dict[str, Any]:
    entry = {
        "type": "directory",
        "oid": "0" * 40,
        "size": 0,
        "path": path.relative_to(root).as_posix(),
    }
    if path.is_file():
        entry |= {"type": "file", "size": path.stat().st_size}
        if path.suffix != ".md":
            entry["lfs"] = {"oid": _sha256(path), "size": path.stat().st_size, "pointerSize": 130}
    return entry


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serving_hub(patch: pytest.MonkeyPatch, root: Path, cache: Path) -> Iterator[Hub]:
    """The hub of `root`, as if HF_ENDPOINT named it, and a cache of its own."""
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = Hub(root)
    for name in (
        "ENDPOINT",
        "HUGGINGFACE_CO_URL_TEMPLATE",
    ):  # what HF_ENDPOINT sets, before the package is loaded
        patch.setattr(
            constants,
            name,
            getattr(constants, name).replace(constants._HF_DEFAULT_ENDPOINT, server.address),
        )
    with serving(server):
        yield server
    close_session()
