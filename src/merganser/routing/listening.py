"""A uvicorn server that withstands slow, silent or many clients, and stops without resetting connections.

Headers have a deadline. If there are too many connections, the oldest that has not sent a complete request is closed.
When the server stops, connections have a moment to finish a request in transit.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from merganser.errors import require
from merganser.routing.batching import Limits

#: Seconds at shutdown in which a request in transit may still arrive.
LINGER = 1.0
#: File descriptors that are not used for connections: libraries, logs, the event loop.
RESERVED = 96


class Connections:
    """The open connections of a server, the oldest first, at most `limit` of them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.ending = False
        self._opened: dict[Any, None] = {}

    def __len__(self) -> int:
        return len(self._opened)

    def add(self, connection: Any) -> None:
        """Add a connection; if there are too many, close the oldest that has not sent a complete request."""
        self._opened[connection] = None
        if len(self._opened) > self.limit:
            others = [other for other in self._opened if other is not connection]
            waiting = (other for other in others if other.is_waiting())
            receiving = (other for other in others if other.is_receiving())
            victim = next(waiting, None) or next(receiving, None) or connection
            self.discard(victim)
            victim.transport.abort()

    def discard(self, connection: Any) -> None:
        self._opened.pop(connection, None)


def create_server(app: Any, *, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None) -> Any:
    """Return a uvicorn server around an application, with deadlines and a bound on connections.

    Args:
        app: The application that `create_app` returned.
        host: The address to listen on.
        port: The port to listen on.
        limits: Seconds for headers and number of connections; the other limits belong to the application.

    Returns:
        A `uvicorn.Server`. Its `run()` serves until SIGINT or SIGTERM, answers pending requests, and returns.

    Example:
        >>> app = mg.routing.create_app(mg.routing.AdaptiveModel(encoder, library, heads))
        >>> server = mg.routing.create_server(app, port=8000)
        >>> server.run()  # doctest: +SKIP
    """
    uvicorn = require("uvicorn", "serve")
    bounds = limits or Limits()
    connections = Connections(min(bounds.connections, _descriptors()))
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=_guarded(connections, bounds.header_seconds),
        ws="none",
        loop="asyncio",
        log_level="warning",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=max(1, round(bounds.timeout + LINGER)),
    )
    return _lossless(connections)(config)


def _descriptors() -> int:
    """Return how many connections the limit on open files allows."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 1 << 20
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(1, soft - RESERVED)


def _lossless(connections: Connections) -> Any:
    """Return the class of a server that closes its sockets only when nobody waits in their queues.

    The system resets connections that wait to be accepted when a listening socket closes, and asyncio drops those that
    were accepted in the same turn of its loop.
    """
    uvicorn = require("uvicorn", "serve")

    class Lossless(uvicorn.Server):  # type: ignore[misc, name-defined]
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            connections.ending = True
            loop = asyncio.get_running_loop()
            listening = [each for server in self.servers for each in server.sockets]
            if isinstance(loop, asyncio.SelectorEventLoop):  # others accept without being asked
                for each in listening:
                    loop.remove_reader(each.fileno())
                await asyncio.sleep(0)  # asyncio attaches what it has accepted
            accepted = [connection for each in listening for connection in _accept_waiting(each.dup())]
            for server in self.servers:  # at once, before others can come
                server.close()
            for connection in accepted:
                await loop.connect_accepted_socket(self._create_protocol, connection)
            await super().shutdown(sockets)

        def _create_protocol(self) -> asyncio.Protocol:
            protocol: asyncio.Protocol = self.config.http_protocol_class(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return protocol

    return Lossless


def _accept_waiting(listening: socket.socket) -> list[socket.socket]:
    """Accept every connection in the queue of a socket, without waiting for more."""
    accepted = []
    with listening:
        listening.setblocking(False)
        while True:
            try:
                accepted.append(listening.accept()[0])
            except OSError:  # the queue is empty, or a client has gone
                return accepted


def _guarded(connections: Connections, header_seconds: float) -> Any:
    """Return the class of one connection; it is defined in a function because uvicorn is optional."""
    h11_impl = require("uvicorn.protocols.http.h11_impl", "serve")

    class Guarded(h11_impl.H11Protocol):  # type: ignore[misc, name-defined]
        _deadline: asyncio.TimerHandle | None = None
        _ending = False

        def is_waiting(self) -> bool:
            """Return whether no request is being answered: none has arrived with all of its headers."""
            return self.cycle is None or bool(self.cycle.response_complete)

        def is_receiving(self) -> bool:
            """Return whether the body of a request is still arriving."""
            return not self.is_waiting() and bool(self.cycle.more_body)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start(header_seconds)
            connections.add(self)
            if connections.ending:
                self.shutdown()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            connections.discard(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self.is_waiting():
                self._stop()
            elif self._deadline is None:
                self._start(header_seconds)

        def handle_events(self) -> None:
            super().handle_events()
            if self._ending and not self.is_waiting():
                self.cycle.keep_alive = False

        def shutdown(self) -> None:
            connections.ending = self._ending = True
            if self.is_waiting():
                self._stop()
                self._start(LINGER)
            else:
                self.cycle.keep_alive = False

        def _start(self, seconds: float) -> None:
            self._deadline = self.loop.call_later(seconds, self._expire)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _expire(self) -> None:
            self._deadline = None
            if self.is_waiting() and not self.transport.is_closing():
                self.transport.close()

    return Guarded
