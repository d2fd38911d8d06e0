"""Read the small JSON files beside weights: configs and tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from merganser.errors import CheckpointError
from merganser.strict_json import read_json


def read_config(directory: Path | None, name: str = "config.json") -> dict[str, Any]:
    """Return the config.json of a model, or another of its configs; empty if there is none."""
    file = directory / name if directory else None
    return read_object(file) if file is not None and file.is_file() else {}


def read_value(file: Path, *, finite: bool = False) -> Any:
    """Return the JSON value in a file, or raise an error that names it. Configs may contain infinities, as
    transformers writes them.
    """
    try:
        return read_json(file, finite=finite)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None


def read_object(file: Path, *, finite: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file, as `read_value`."""
    data = read_value(file, finite=finite)
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    return data
