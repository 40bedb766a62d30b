"""What the page's server refuses: foreign names of this machine, files, and large requests."""

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
"""Of a request; the prompt is the only long thing in one."""
CLOSED = ("upload", "upload_progress", "proxy=")
"""Gradio's own endpoints that the page does not need, by the beginning of the path's last part."""


class Guard:
    """ASGI middleware around Gradio's application.

    A web page elsewhere can let its own name stand for 127.0.0.1 (DNS rebinding) and then read what is served here,
    but the browser still sends that name as `Host`. Served on loopback, only loopback names are answered; served on
    another address, any address and the names that this machine has.

    Args:
        app: What answers the requests that are not refused.
        host: Where it is served.
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
        """Status and reason, None for a request that is answered."""
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
