"""Files that are read by ranges: over HTTP, or through fsspec (`s3://`, `gs://`, `hf://`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from merganser.checkpoints.remote.retrying import TransientError, retry
from merganser.errors import CheckpointError, MissingExtraError, first_line, require

#: Maximum connections to all servers together.
PARALLEL = 16
#: Size of the first read, which contains the header of most files.
FIRST = 1 << 16
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class RemoteFile(Protocol):
    """A remote file that must not change after it is opened."""

    url: str
    size: int
    #: Identifies the version of the file.
    version: str

    def read(self, start: int, stop: int) -> bytes:
        """Return these bytes; retries temporary failures."""
        ...

    def check(self) -> None:
        """Refuse a file that has changed since it was opened."""
        ...


def open_file(url: str) -> RemoteFile:
    """Open a file that must be readable by ranges.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it cannot be read by ranges.
    """
    check_url(url)
    return HttpFile(url) if is_http(url) else StoreFile(url)


def fetch(url: str, limit: int) -> bytes:
    """Return the content of a small file.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it cannot be read, or has more than `limit` bytes.
    """
    check_url(url)
    if is_http(url):
        return retry(lambda: _get(url, limit), url, opening=True)
    file = StoreFile(url)
    _check_limit(url, file.size, limit)
    return file.read(0, file.size)


def check_url(url: str) -> None:
    """Refuse an address that contains a secret: it would appear in the card and the lock file of the output."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise CheckpointError(
            f"{parts.scheme}://{parts.hostname or ''}{parts.path}: an address with a password, a signature or other "
            "parameters would be written to the output; use one without, and the credentials of the environment"
        )
    if parts.scheme == "file":
        raise CheckpointError(f"{url}: give the path itself, without file://")


def is_http(url: str) -> bool:
    """Return whether an address is read over HTTP, not through fsspec."""
    return url.startswith(("https://", "http://"))


class HttpFile:
    """A file on a server that supports range requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.size, self.version, self._first = retry(self._look, url, opening=True)

    def _look(self) -> tuple[int, str, bytes]:
        found = bytearray()
        with _stream(self.url, (0, FIRST)) as response:
            if response.status_code == 200:
                raise CheckpointError(
                    f"{self.url}: the server does not support range requests, so the file cannot be read in "
                    "parts; download it and give its path"
                )
            if response.status_code == 416:
                raise CheckpointError(f"{self.url}: the file is empty")
            size = _read_total(response, self.url)
            try:
                _collect(response, found, min(FIRST, size))
            except _Progress:
                raise TransientError("the response was cut short") from None
            return size, _version(response), bytes(found)

    def read(self, start: int, stop: int) -> bytes:
        if stop <= len(self._first):
            return self._first[start:stop]
        found = bytearray()

        def more() -> None:
            with _stream(self.url, (start + len(found), stop)) as response:
                self._check_same(response, start + len(found))
                _collect(response, found, stop - start)

        while len(found) < stop - start:  # progress resets the number of tries
            with suppress(_Progress):
                retry(more, self.url)
        return bytes(found)

    def check(self) -> None:
        """Do nothing: every response carries its version."""

    def _check_same(self, response: Any, start: int) -> None:
        if response.status_code not in (206, 200, 416):
            raise CheckpointError(f"{self.url}: the server says {response.status_code} {response.reason_phrase}")
        same = response.status_code == 206 and _version(response) == self.version
        if not same or _read_total(response, self.url) != self.size:
            raise _changed(self.url)
        if not response.headers["content-range"].startswith(f"bytes {start}-"):
            raise CheckpointError(f"{self.url}: the server sent another range than requested")


class _Progress(Exception):
    """Some bytes arrived before the connection broke."""


def _collect(response: Any, into: bytearray, wanted: int) -> None:
    import httpx

    before = len(into)
    try:
        for chunk in response.iter_raw():
            into += chunk[: wanted - len(into)]
    except httpx.TransportError as error:
        if len(into) > before:
            raise _Progress from error
        raise TransientError(f"the connection broke ({type(error).__name__})") from error
    if len(into) < wanted:
        if len(into) > before:
            raise _Progress
        raise TransientError("the response was cut short")


def _get(url: str, limit: int) -> bytes:
    import httpx

    found = bytearray()
    with _stream(url) as response:
        if response.status_code != 200:
            raise CheckpointError(f"{url}: the server says {response.status_code} {response.reason_phrase}")
        length = int(response.headers.get("content-length", "0") or 0)
        _check_limit(url, length, limit)
        try:
            for chunk in response.iter_bytes():
                found += chunk
                _check_limit(url, len(found), limit)
        except httpx.TransportError as error:
            raise TransientError(f"the connection broke ({type(error).__name__})") from error
        except httpx.DecodingError as error:
            raise CheckpointError(f"{url}: the response cannot be decoded: {error}") from None
    return bytes(found)


def _check_limit(url: str, size: int, limit: int) -> None:
    if size > limit:
        raise CheckpointError(f"{url}: {size:,} bytes, more than the limit of {limit:,} for a file beside the weights")


@contextmanager
def _stream(url: str, span: tuple[int, int] | None = None) -> Iterator[Any]:
    """Open a server's response, to these bytes or all, before its body is read; temporary failures are
    `TransientError`.
    """
    import httpx

    headers = {"Accept-Encoding": "identity", "Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
    with ExitStack() as opened:
        try:
            response = opened.enter_context(_client(os.getpid()).stream("GET", url, headers=headers))
        except httpx.TransportError as error:
            raise TransientError(f"no connection ({type(error).__name__})") from error
        except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
            raise CheckpointError(f"{url}: {error}") from None
        _judge(response, url)
        yield response


def _judge(response: Any, url: str) -> None:
    if url.startswith("https") and response.url.scheme != "https":
        raise CheckpointError(f"{url}: redirects to an unencrypted address, which is not followed")
    status = response.status_code
    if status in (404, 410):
        raise FileNotFoundError(url)
    if status in (401, 403):
        raise CheckpointError(f"{url}: the server says {status}: reading it needs other credentials")
    if status in _BUSY:
        asked = response.headers.get("retry-after", "")
        raise TransientError(f"the server says {status}", float(asked) if asked.isdigit() else 0.0)


def _changed(url: str) -> CheckpointError:
    return CheckpointError(
        f"{url}: changed while it was read; the result was discarded: merge again once it no longer changes"
    )


def _read_total(response: Any, url: str) -> int:
    """Return the size of the whole file, from a partial response."""
    said = response.headers.get("content-range", "").rpartition("/")[2]
    if response.status_code != 206 or not said.isdigit():
        raise CheckpointError(f"{url}: the server says {response.status_code} without the size of the file")
    return int(said)


def _version(response: Any) -> str:
    return str(response.headers.get("etag") or response.headers.get("last-modified") or "")


@lru_cache(maxsize=1)
def _client(process: int) -> Any:
    """Return the connections of a process, which must not be shared with another."""
    httpx: Any = require("httpx", "remote")
    limits = httpx.Limits(max_connections=PARALLEL, max_keepalive_connections=PARALLEL)
    return httpx.Client(follow_redirects=True, limits=limits, timeout=httpx.Timeout(30.0, connect=10.0))


class StoreFile:
    """A file of an object store, or of anything else that fsspec can read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store, self._path = open_store(url)
        # When fsspec opens a file per range, it would read ahead five megabytes by default.
        opens = type(self._store).cat_file is require("fsspec", "remote").AbstractFileSystem.cat_file
        self._options = {"cache_type": "none"} if opens else {}
        self._checking = threading.Lock()
        self.size, self.version = self._look()

    def _look(self) -> tuple[int, str]:
        found = retry(lambda: _attempt(self.url, lambda: self._store.info(self._path)), self.url, opening=True)
        if found.get("type") == "directory" or not isinstance(found.get("size"), int):
            raise FileNotFoundError(self.url)
        marks = ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "blob_id", "created")
        return found["size"], " ".join(str(found[mark]) for mark in marks if found.get(mark) is not None)

    def read(self, start: int, stop: int) -> bytes:
        def attempt() -> bytes:
            found = _attempt(self.url, lambda: self._store.cat_file(self._path, start, stop, **self._options))
            if len(found) != stop - start:
                raise TransientError(f"got {len(found)} bytes instead of {stop - start}")
            return bytes(found)

        return retry(attempt, self.url)

    def check(self) -> None:
        with self._checking:
            self._store.invalidate_cache(self._store._parent(self._path))
            try:
                now = self._look()
            except FileNotFoundError:
                now = None
        if now != (self.size, self.version):
            raise _changed(self.url)


def open_store(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it."""
    fsspec: Any = require("fsspec", "remote")
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url}: {error} (s3:// needs s3fs, gs:// needs gcsfs: pip install them)") from None
    except ValueError as error:
        raise CheckpointError(f"{url}: {error}") from None
    return store, path


def _attempt(url: str, call: Any) -> Any:
    """Call an object store; its client raises many kinds of errors."""
    try:
        return call()
    except (FileNotFoundError, CheckpointError):
        raise
    except PermissionError as error:
        raise CheckpointError(f"{url}: permission denied: {error}") from None
    except (OSError, TimeoutError) as error:
        raise TransientError(first_line(error)) from error
    except Exception as error:
        raise CheckpointError(f"{url}: cannot be read: {first_line(error)}") from None
