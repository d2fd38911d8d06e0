"""Applications served in a thread, on a free port of the loopback."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from merganser.routing.batching import Limits
from merganser.routing.listening import create_server


class Running:
    """A server from `with` to its end."""

    def __init__(self, app: Any, limits: Limits | None = None) -> None:
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = create_server(app, limits=limits)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> Running:
        self.thread.start()
        until = time.monotonic() + 30
        while not self.server.started and time.monotonic() < until:
            time.sleep(0.01)
        assert self.server.started
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.socket.close()

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A connection of its own, with something said on it."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(sent)
        return connection
