"""A small server of files in S3's way, which can be told to fail."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class ObjectStore(ThreadingHTTPServer):
    """Serves `root`/<bucket>/<key>, whole or by range."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.address = root, f"http://127.0.0.1:{self.server_address[1]}"
        self.behave()

    def behave(self) -> None:
        """Fail in no way, and forget what was asked for."""
        self.requests: Counter[tuple[str, str]] = Counter()
        """How often each (method, path) was asked for."""
        self.status = 200
        """What to answer; anything else than 200 for everything."""
        self.silent = False
        """Accept connections and say nothing."""
        self.damage: Counter[str] = Counter()
        """path → how many times to serve it with a flipped bit."""

    def fetched(self, name: str) -> int:
        """How often files of this kind of name were asked for."""
        return sum(n for (method, path), n in self.requests.items() if method == "GET" and name in path)


class Handler(BaseHTTPRequestHandler):
    server: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        store, path = self.server, self.path.split("?")[0]
        store.requests[self.command, path] += 1
        while store.silent:
            time.sleep(0.05)
        file = store.root / path.lstrip("/")
        status = store.status if store.status != 200 or file.is_file() else 404
        headers = {"Last-Modified": "Fri, 20 Nov 2026 00:00:00 GMT", "ETag": '"0"'}
        if status == 200:
            content = bytearray(file.read_bytes())
            if self.command == "GET" and store.damage[path]:
                store.damage[path] -= 1
                content[len(content) // 2] ^= 1
            if part := self.headers.get("Range"):
                first, last = part.removeprefix("bytes=").split("-")
                whole, content, status = len(content), content[int(first) : int(last or len(content)) + 1], 206
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{whole}"
        else:
            code = {403: "AccessDenied", 404: "NoSuchKey"}.get(status, "InternalError")
            content = bytearray(f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Nothing on the terminal."""


@contextmanager
def serving(root: Path) -> Iterator[ObjectStore]:
    """The store, running in a thread."""
    store = ObjectStore(root)
    threading.Thread(target=store.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield store
    finally:
        store.silent = False
        store.shutdown()
        store.server_close()
