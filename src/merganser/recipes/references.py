"""Resolve relative paths of a recipe: beside the recipe first, then in the working directory."""

from __future__ import annotations

import os.path
from pathlib import Path

from merganser.checkpoints.references import HUB_ID, exists, parts


def locate(reference: str, root: Path | None) -> str:
    """Return the reference with each of its paths (`model`, `model+adapter`) resolved; hub ids are unchanged."""
    if root is None:
        return reference
    found = parts(reference, lambda part: os.path.exists(_resolve_beside(part, root)) or exists(part))
    return "+".join(_locate_part(part, root) for part in found)


def find_missing(reference: str, root: Path | None) -> str | None:
    """Return the part of a reference that is a path and does not exist, if any; hub ids are not looked up."""
    found = parts(locate(reference, root))
    return next((part for part in found if not exists(part) and not HUB_ID.fullmatch(part)), None)


def describe_places(reference: str, root: Path | None) -> str:
    """Return where a missing path was looked for, for a message."""
    if Path(reference).is_absolute() or root is None:
        return ""
    if root.resolve() == Path.cwd():
        return f" (looked in {Path.cwd()})"
    return f" (looked beside the recipe in {root.resolve()}, then in the working directory {Path.cwd()})"


def _locate_part(reference: str, root: Path) -> str:
    beside = _resolve_beside(reference, root)
    # Path.exists would raise on text that is too long for a path.
    return str(beside) if os.path.exists(beside) else reference


def _resolve_beside(reference: str, root: Path) -> Path:
    return root / os.path.expanduser(reference)
