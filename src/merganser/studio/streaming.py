"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from merganser.errors import MerganserError
from merganser.plain import plain

#: Seconds between two checks for changes on disk.
LOOK = 0.5


async def watch(look: Callable[[], Any], every: float = LOOK, ignore: str = "") -> AsyncIterator[Any]:
    """Yield what a look finds, whenever it differs from the look before; `ignore` names a key that does not count."""
    before: str | None = None
    while True:
        found = await asyncio.to_thread(look)
        mark = json.dumps(_drop_keys(found, ignore), sort_keys=True, default=str)
        if mark != before:
            before = mark
            yield found
        await asyncio.sleep(every)


def _drop_keys(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _drop_keys(each, key) for name, each in value.items() if name != key}
    return [_drop_keys(each, key) for each in value] if isinstance(value, list) else value


async def async_lines(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield _line(event)
    except MerganserError as error:
        yield _line({"event": "error", "message": str(error)})


def lines(events: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """Yield events as lines; an error while they are made is the last of them."""
    try:
        for event in events:
            yield _line(event)
    except MerganserError as error:
        yield _line({"event": "error", "message": str(error)})
    except Exception as error:  # models raise many kinds of errors
        reason = (str(error).strip().splitlines() or [""])[0]
        yield _line({"event": "error", "message": f"{type(error).__name__}: {reason}"})


def _line(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(plain(event), allow_nan=False)}\n\n"
