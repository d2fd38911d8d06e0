"""Access control: only this machine's own pages, with the token."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

RequestScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[RequestScope, Receive, Send], Awaitable[None]]

_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Gate:
    """ASGI middleware in front of the application.

    Every request must name this machine as its host (a page elsewhere whose name was pointed here does not) and, if a
    page sends it, come from the studio's own. Everything under `/api/` needs the token, as `Authorization: Bearer`.

    Args:
        app: The application.
        token: What the page must know.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token.encode()
        #: When the last request came (`time.monotonic`); None before the first.
        self.asked: float | None = None

    async def __call__(self, scope: RequestScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        self.asked = time.monotonic()
        if refused := self._refuse(scope):
            await _answer(send, *refused)
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, guarded)

    def _refuse(self, scope: RequestScope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if host.rpartition(":")[0] not in _LOOPBACK and host not in _LOOPBACK:
            return 403, "the studio answers requests to 127.0.0.1 or localhost only"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "the request comes from another page"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "the request comes from another site"
        if not scope["path"].startswith("/api/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            return 401, "the token is missing or wrong: open the address that `merganser studio` printed"
        return None


async def _answer(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
