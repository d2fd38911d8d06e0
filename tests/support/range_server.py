"""A file server on the loopback that answers range requests: late, in part, with errors, as a test asks for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class RangeServer:
    """Serves a directory from `with` to its end.

    Attributes:
        delay: Seconds before every answer.
        ranges: Whether range requests are understood.
        fault: Called with the number of the request and the path; returns "" or what goes wrong: a status such as
            "503", "cut" (half of the body, then the connection closes), "drop" (the connection closes at once).
        etag: Called with the number of the request; returns the version.
        answer: Called with a path and the body of a request; returns JSON to answer with instead of a file, or None.
        requests: The paths that were asked for, with the range.
        sent: The bytes of bodies that were sent.
    """

    def __init__(self, directory: Path, delay: float = 0.0) -> None:
        self.directory = directory
        self.delay = delay
        self.ranges = True
        self.fault: Callable[[int, str], str] = lambda number, path: ""
        self.etag: Callable[[int], str] = lambda number: '"one"'
        self.answer: Callable[[str, bytes], str | None] = lambda path, body: None
        self.requests: list[tuple[str, str]] = []
        self.sent = 0
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> RangeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _handler(owner: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that went away
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _answer(self, body: bytes) -> bool:
            found = owner.answer(self.path, body)
            if found is None:
                return False
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found.encode())
            return True

        def do_GET(self) -> None:
            if self._answer(b""):
                return
            asked = self.headers.get("Range", "")
            with owner.lock:
                number = len(owner.requests)
                owner.requests.append((self.path, asked))
            time.sleep(owner.delay)
            fault = owner.fault(number, self.path)
            if fault == "drop":
                self.close_connection = True
                return
            file = owner.directory / unquote(self.path).lstrip("/")
            if fault.isdigit() or not file.is_file():
                self.send_response(int(fault or 404))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = file.stat().st_size
            start, stop, status = 0, size, 200
            if asked and owner.ranges:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, stop, status = int(first), min(int(last) + 1, size), 206
            if start >= size and status == 206:
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            with file.open("rb") as stream:
                stream.seek(start)
                body = stream.read(stop - start)
            self.send_response(status)
            self.send_header("ETag", owner.etag(number))
            self.send_header("Content-Length", str(len(body)))
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.end_headers()
            if fault == "cut":
                body = body[: len(body) // 2]
                self.close_connection = True
            with owner.lock:  # before the client has the body, and may ask how much was sent
                owner.sent += len(body)
            self.wfile.write(body)

    return Handler
