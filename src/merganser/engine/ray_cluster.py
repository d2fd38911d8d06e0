"""Start or find a Ray cluster. A cluster started here is for this machine only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from merganser.errors import MerganserError, require

#: Ray's switch between clusters and a single machine, and the copy made when Ray is imported.
_SWITCH, _COPY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"


def start_ray(address: str, workers: int | None = None, **options: Any) -> Any:
    """Connect to a Ray cluster and return the module `ray`.

    Args:
        address: The address of the cluster (`"auto"` finds one). `"local"` starts one that listens on 127.0.0.1 only,
            since anyone who reaches a port of Ray can run code.
        workers: The number of processors of a cluster started here.
        options: Further options of `ray.init`.

    Raises:
        MissingExtraError: If Ray is not installed.
        MerganserError: If the cluster does not answer.

    Example:
        >>> ray = start_ray("local", workers=2)  # doctest: +SKIP
    """
    if address != "local":
        return _connect(address, **options)
    with _on_this_machine():
        return _connect(None, num_cpus=workers, include_dashboard=False, **options)


def _connect(address: str | None, **options: Any) -> Any:
    ray: Any = require("ray", "ray")
    try:
        ray.init(address=address, logging_level="error", **options)
    except Exception as error:  # Ray has no exception class for a cluster that does not start
        raise MerganserError(
            f"ray={address or 'local'!r}: the cluster does not answer: {str(error).strip()}"
        ) from error
    return ray


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """Let Ray use the loopback address, as it does where it supports no clusters."""
    require("ray", "ray")
    constants = import_module("ray._private.ray_constants")
    before, copied = os.environ.get(_SWITCH), getattr(constants, _COPY)
    os.environ[_SWITCH] = "0"  # for the processes that Ray starts
    setattr(constants, _COPY, False)  # for this one
    try:
        yield
    finally:
        setattr(constants, _COPY, copied)
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
