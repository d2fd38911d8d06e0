"""Files that are read by ranges: over HTTP, or from whatever fsspec knows (`s3://`, `gs://`, `hf://`)."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from merganser.checkpoints.remote.retrying import TransientError, retry
from merganser.errors import CheckpointError, MissingExtraError, require

#: Connections at once, to all servers together.
PARALLEL = 16
#: What is read at first: the header of most files is within it.
FIRST = 1 << 16
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class RemoteFile(Protocol):
    """A file somewhere else that stays as it was when it was opened, or is refused."""

    url: str
    size: int
    #: Tells versions of the file apart.
    version: str

    def read(self, start: int, stop: int) -> bytes:
        """Return these bytes; tries again what may go better the next time."""
        ...

    def check(self) -> None:
        """Refuse a file that is not the one that was opened any more."""
        ...


def open_file(url: str) -> RemoteFile:
    """Open a file that must be readable by ranges.

    Raises:
        FileNotFoundError: If there is none.
        CheckpointError: If it cannot be read, or not by ranges.
    """
    check_url(url)
    return HttpFile(url) if _is_http(url) else StoreFile(url)


def fetch(url: str, limit: int) -> bytes:
    """Return the content of a small file.

    Raises:
        FileNotFoundError: If there is none.
        CheckpointError: If it cannot be read, or has more than `limit` bytes.
    """
    check_url(url)
    if _is_http(url):
        return retry(lambda: _get(url, limit), url, opening=True)
    file = StoreFile(url)
    _check_limit(url, file.size, limit)
    return file.read(0, file.size)


def check_url(url: str) -> None:
    """Refuse an address with a secret in it: it would end up in the card and in the lock file of the output."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise CheckpointError(
            f"{parts.scheme}://{parts.hostname or ''}{parts.path}: an address with a password, a signature or other "
            "parameters would be written to the output; use one without, and the credentials of the environment"
        )
    if parts.scheme == "file":
        raise CheckpointError(f"{url}: name the path itself, without file://")


def _is_http(url: str) -> bool:
    return url.startswith(("https://", "http://"))


class HttpFile:
    """A file of a server that answers range requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.size, self.version, self._first = retry(self._look, url, opening=True)

    def _look(self) -> tuple[int, str, bytes]:
        found = bytearray()
        with _stream(self.url, 0, FIRST) as response:
            if response.status_code == 200:
                raise CheckpointError(
                    f"{self.url}: the server does not answer range requests, so it cannot be read in parts; download "
                    "the file and name its path"
                )
            if response.status_code == 416:
                raise CheckpointError(f"{self.url}: the file is empty")
            size = _total(response, self.url)
            try:
                _collect(response, found, min(FIRST, size))
            except _Progress:
                raise TransientError("the answer ended before its end") from None
            return size, _version(response), bytes(found)

    def read(self, start: int, stop: int) -> bytes:
        if stop <= len(self._first):
            return self._first[start:stop]
        found = bytearray()

        def more() -> None:
            with _stream(self.url, start + len(found), stop) as response:
                self._check_same(response, start + len(found))
                _collect(response, found, stop - start)

        while len(found) < stop - start:  # every time that brings something may be followed by as many tries
            before = len(found)
            try:
                retry(more, self.url)
            except _Progress:
                assert len(found) > before
        return bytes(found)

    def check(self) -> None:
        """Every answer says which version it is of."""

    def _check_same(self, response: Any, start: int) -> None:
        if response.status_code not in (206, 200, 416):
            raise CheckpointError(f"{self.url}: the server says {response.status_code} {response.reason_phrase}")
        same = response.status_code == 206 and _version(response) == self.version
        if not same or _total(response, self.url) != self.size:
            raise CheckpointError(
                f"{self.url}: has changed while it was read; nothing of the result is kept: merge again once it no "
                "longer changes"
            )
        if not response.headers["content-range"].startswith(f"bytes {start}-"):
            raise CheckpointError(f"{self.url}: the server sends another range than it was asked for")


class _Progress(Exception):
    """Some bytes came before the connection broke."""


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
        raise TransientError("the answer ended before its end")


def _get(url: str, limit: int) -> bytes:
    import httpx

    found = bytearray()
    with _stream(url, None, None) as response:
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
            raise CheckpointError(f"{url}: the answer cannot be decoded: {error}") from None
    return bytes(found)


def _check_limit(url: str, size: int, limit: int) -> None:
    if size > limit:
        raise CheckpointError(f"{url}: {size:,} bytes, more than the {limit:,} that a file beside the weights may have")


class _stream:
    """An answer of a server, its body not read yet; states that may pass are `TransientError`."""

    def __init__(self, url: str, start: int | None, stop: int | None) -> None:
        self._url = url
        headers = {"Accept-Encoding": "identity"} if start is not None else {}
        if start is not None and stop is not None:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        self._stream = _client(os.getpid()).stream("GET", url, headers=headers)

    def __enter__(self) -> Any:
        import httpx

        try:
            response = self._stream.__enter__()
        except httpx.TransportError as error:
            raise TransientError(f"no connection ({type(error).__name__})") from error
        except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
            raise CheckpointError(f"{self._url}: {error}") from None
        try:
            self._judge(response)
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise
        return response

    def _judge(self, response: Any) -> None:
        if self._url.startswith("https") and response.url.scheme != "https":
            raise CheckpointError(f"{self._url}: leads to an address without encryption, which is not followed")
        status = response.status_code
        if status in (404, 410):
            raise FileNotFoundError(self._url)
        if status in (401, 403):
            raise CheckpointError(f"{self._url}: the server says {status}: it wants credentials that allow reading it")
        if status in _BUSY:
            asked = response.headers.get("retry-after", "")
            raise TransientError(f"the server says {status}", float(asked) if asked.isdigit() else 0.0)

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)


def _total(response: Any, url: str) -> int:
    """The size of the whole file, of which an answer has a part."""
    said = response.headers.get("content-range", "").rpartition("/")[2]
    if response.status_code != 206 or not said.isdigit():
        raise CheckpointError(f"{url}: the server says {response.status_code}, and not how large the file is")
    return int(said)


def _version(response: Any) -> str:
    return str(response.headers.get("etag") or response.headers.get("last-modified") or "")


@lru_cache(maxsize=1)
def _client(process: int) -> Any:
    """The connections of a process; those of another one are not to be shared."""
    httpx: Any = require("httpx", "remote")
    limits = httpx.Limits(max_connections=PARALLEL, max_keepalive_connections=PARALLEL)
    return httpx.Client(follow_redirects=True, limits=limits, timeout=httpx.Timeout(30.0, connect=10.0))


class StoreFile:
    """A file of an object store, or of anything else that fsspec can read."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store, self._path = open_store(url)
        # Where fsspec opens a file for every range, it would read five megabytes more than it is asked for.
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
                raise TransientError(f"{len(found)} bytes came instead of {stop - start}")
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
            raise CheckpointError(
                f"{self.url}: has changed while it was read; nothing of the result is kept: merge again once it no "
                "longer changes"
            )


def open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it."""
    fsspec: Any = require("fsspec", "remote")
    try:
        store, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url}: {error} (s3:// needs s3fs, gs:// needs gcsfs: pip install them)") from None
    except ValueError as error:
        raise CheckpointError(f"{url}: {error}") from None
    return store, path


def _attempt(url: str, call: Any) -> Any:
    """What an object store answers; its client has many ways to say that it could not."""
    try:
        return call()
    except (FileNotFoundError, CheckpointError):
        raise
    except PermissionError as error:
        raise CheckpointError(f"{url}: may not be read: {error}") from None
    except (OSError, TimeoutError) as error:
        raise TransientError((str(error).splitlines() or [type(error).__name__])[0][:200]) from error
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{url}: cannot be read: {said}") from None
