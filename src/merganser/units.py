"""Parse and format sizes and durations."""

from __future__ import annotations

import re
from decimal import Decimal

from merganser.errors import InputError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes in "2GiB", "512MB", "1.5g" or "1000000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE | re.ASCII)
    if not match or match[2].lower() == "i":
        raise InputError(f"{text!r} is not a size; write for example 2GiB or 512MB")
    return int(Decimal(match[1]) * _FACTORS[match[2].lower()])


def parse_time(text: str) -> float:
    """Return the seconds in "90s", "10m", "1.5h" or "1h30m"."""
    number = r"(?:(\d+(?:\.\d+)?){})?\s*"
    match = re.fullmatch(r"\s*" + "".join(map(number.format, "hms")), text, re.IGNORECASE | re.ASCII)
    hours, minutes, seconds = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    if not (total := 3600 * hours + 60 * minutes + seconds):
        raise InputError(f"{text!r} is not a time; write for example 90s, 10m or 1h30m")
    return total


def show_size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def show_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
