"""Protects the page's server: refuses foreign host names, files and large requests."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 1 << 20
"""The largest request in bytes; only the prompt in it is long."""
CLOSED = ("upload", "upload_progress", "proxy=")
"""Gradio's endpoints that the page does not need, by the beginning of a part of the path."""


class Guard:
    """ASGI middleware around Gradio's application.

    A foreign web page can make its host name resolve to 127.0.0.1 (DNS rebinding) and then read this page, but the
    browser still sends that name as `Host`. On loopback, only loopback names are accepted; on another address, any IP
    address and this machine's names.

    Args:
        app: The application that answers accepted requests.
        host: The address that the page is served at.
    """

    def __init__(self, app: App, host: str) -> None:
        self.app, self.on_loopback = app, is_loopback(host)
        self.names = {"localhost", host.lower()}
        if not self.on_loopback:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and (refusal := self.refusal(scope)) is not None:
            status, reason = refusal
            text = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": status, "headers": text})
            await send({"type": "http.response.body", "body": reason.encode()})
        else:
            await self.app(scope, receive, send)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason of a refusal, None for an accepted request."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_ours(headers.get(b"host", "")):
            return 421, "this page answers only to the address that anlit explore printed"
        if any(part.startswith(CLOSED) for part in scope["path"].split("/")):
            return 403, "this page takes no files"
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            size = headers.get(b"content-length", "")
            if not size.isdecimal():
                return 411, "a request says how long it is"
            if int(size) > MOST_BYTES:
                return 413, f"a request has at most {MOST_BYTES:,} bytes"
        return None

    def _is_ours(self, header: str) -> bool:
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        return name in self.names or (is_loopback(name) if self.on_loopback else _is_address(name))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is served at `host`."""
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
