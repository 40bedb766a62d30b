"""Two small file servers on this machine, like S3 and like the hub. Tests make them fail."""

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

COMMIT = "c0ffee" + 34 * "0"
"""The commit of the branch main in all repositories."""
SERVER_POLL_S = 0.01
SILENCE_POLL_S = 0.05
S3_CODES = {403: "AccessDenied", 404: "NoSuchKey"}
LAST_MODIFIED = {"Last-Modified": "Fri, 20 Nov 2026 00:00:00 GMT", "ETag": '"0"'}
ENDPOINT_CONSTANTS = ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE")
"""Constants of huggingface_hub that HF_ENDPOINT sets when the package is loaded."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.root = root
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.behave()

    def behave(self) -> None:
        """Stop failing, and forget all requests."""

    class Handler(BaseHTTPRequestHandler):
        server: Any
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

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
    threading.Thread(target=server.serve_forever, args=(SERVER_POLL_S,), daemon=True).start()
    try:
        yield server
    finally:
        server.silent = False
        server.shutdown()
        server.server_close()


class ObjectStore(_Server):
    def behave(self) -> None:
        self.requests: list[tuple[str, str]] = []  # method and path of every request
        self.status = 200  # the answer to all requests if it is not 200
        self.silent = False  # accept connections and do not answer
        self.damage: Counter[str] = Counter()  # path → how often to serve it with a flipped bit

    def fetched(self, name: str) -> int:
        """Return how often files with `name` in their path were requested."""
        requests = list(self.requests)  # threads of the server may append meanwhile
        return sum(method == "GET" and name in path for method, path in requests)

    class Handler(_Server.Handler):
        def do_GET(self) -> None:
            store = self.server
            path = self.path.split("?")[0]
            store.requests.append((self.command, path))
            while store.silent:
                time.sleep(SILENCE_POLL_S)
            file = store.root / path.lstrip("/")
            if store.status != 200 or not file.is_file():
                status = store.status if store.status != 200 else 404
                code = S3_CODES.get(status, "InternalError")
                error = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
                return self.answer(error.encode(), status)
            content = bytearray(file.read_bytes())
            if self.command == "GET" and store.damage[path]:
                store.damage[path] -= 1
                content[len(content) // 2] ^= 1
            return self.answer(bytes(content), headers=LAST_MODIFIED)


class Hub(_Server):
    """Serves `root`/datasets/OWNER/NAME and `root`/models/OWNER/NAME, each with a single commit."""

    def behave(self) -> None:
        self.refusal: tuple[int, str] | None = None  # status and X-Error-Code of every answer
        self.damaged = 0  # number of downloads that have a wrong first byte
        self.names: list[str] = []  # additional names in every listing
        self.requested_paths: list[str] = []  # path of every request

    class Handler(_Server.Handler):
        def refuse(self, status: int, code: str = "") -> None:
            self.answer(b"{}", status, {"X-Error-Code": code} if code else {})

        def do_GET(self) -> None:
            self.server.requested_paths.append(self.path)
            if self.server.refusal is not None:
                return self.refuse(*self.server.refusal)
            path = urlsplit(self.path).path
            repository = r"([^/]+/[^/]+)"
            answers = {
                rf"/api/(datasets|models)/{repository}/revision/([^/]+)": self.revision,
                rf"/api/(datasets|models)/{repository}/tree/([^/]+)(?:/(.+))?": self.tree,
                rf"/(?:(datasets)/)?{repository}/resolve/([^/]+)/(.+)": self.resolve,
            }
            for pattern, answer in answers.items():
                match = re.fullmatch(pattern, path)
                if match is not None:
                    groups = [group and unquote(group) for group in match.groups()]
                    return self.answer_from_repository(answer, *groups)
            return self.blob(path.removeprefix("/blob/"))

        def answer_from_repository(
            self, answer: Any, kind: str | None, repo_id: str, revision: str, *path: str
        ) -> None:
            root = self.server.root / (kind or "models") / repo_id
            if not root.is_dir():
                return self.refuse(401, "RepoNotFound")
            if revision not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            return answer(root, *path)

        def revision(self, root: Path) -> None:
            self.answer(json.dumps({"id": root.name, "sha": COMMIT}).encode())

        def tree(self, root: Path, subfolder: str | None) -> None:
            folder = root / (subfolder or ".")
            if not folder.is_dir():
                return self.refuse(404, "EntryNotFound")
            entries = [_entry(root, path) for path in sorted(folder.rglob("*"), reverse=True)]
            for name in self.server.names:
                entries.append({"type": "file", "oid": "0" * 40, "size": 5, "path": name})
            return self.answer(json.dumps(entries).encode())

        def resolve(self, root: Path, name: str) -> None:
            """Redirect to the bytes, on another host as on the hub."""
            path = root / name
            if not path.is_file():
                return self.refuse(404, "EntryNotFound")
            host = self.server.address.replace("127.0.0.1", "localhost")
            relative = path.relative_to(self.server.root).as_posix()
            headers = {
                "Location": f"{host}/blob/{relative}?signature=1",
                "X-Linked-Size": str(path.stat().st_size),
                "X-Repo-Commit": COMMIT,
                "X-Linked-ETag": _sha256(path),
            }
            return self.answer(b"", 302, headers)

        def blob(self, relative: str) -> None:
            content = (self.server.root / relative).read_bytes()
            if self.server.damaged:
                self.server.damaged -= 1
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
    """Serve `root` as the hub, as if HF_ENDPOINT named it, with an empty cache."""
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setenv("NO_PROXY", "127.0.0.1,localhost")
    server = Hub(root)
    for name in ENDPOINT_CONSTANTS:
        value = getattr(constants, name)
        patch.setattr(
            constants, name, value.replace(constants._HF_DEFAULT_ENDPOINT, server.address)
        )
    with serving(server):
        yield server
    close_session()
