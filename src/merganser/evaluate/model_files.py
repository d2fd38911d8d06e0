"""The files beside a model's weights that decide its answers: configuration, tokenizer, chat templates, own code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from merganser.checkpoints.references import HUB_ID, parts
from merganser.errors import CheckpointError, require

#: What `transformers` reads from a model's directory, besides weights.
PATTERNS = (
    "config.json", "*_config.json", "tokenizer*", "*token*.json", "vocab*", "merges.txt", "*.model", "*.spm", "*.bpe",
    "*.tiktoken", "*.jinja", "chat_template*", "additional_chat_templates/*", "*.py",
)  # fmt: skip


def settings_files(directory: Path) -> list[Path]:
    """Return the files in a directory that decide answers besides the weights, in order."""
    return sorted({file for pattern in PATTERNS for file in directory.glob(pattern) if file.is_file()})


def hash_settings(reference: str) -> dict[str, str]:
    """Return a hash of every such file of a model, by its name.

    Args:
        reference: A directory, an id of the hub, or several joined by `+`; other models have no such files.

    Returns:
        Hashes by `directory/name`.

    Example:
        >>> sorted(hash_settings("math"))  # doctest: +SKIP
        ['math/config.json', 'math/tokenizer.json', 'math/tokenizer_config.json']
    """
    return {
        f"{part}/{file.relative_to(folder).as_posix()}": hashlib.sha256(file.read_bytes()).hexdigest()
        for part in parts(reference)
        for folder in _find_folders(part)
        for file in settings_files(folder)
    }


def _find_folders(part: str) -> Iterator[Path]:
    """Yield the directory of a model; for one of the hub, that of its settings in the hub's cache."""
    path = Path(part).expanduser()
    if path.is_dir():
        yield path
    elif not path.exists() and HUB_ID.fullmatch(part):
        repository, _, revision = part.partition("@")
        hub = require("huggingface_hub", "hf")
        try:
            yield Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(PATTERNS)))
        except Exception as error:  # the hub client raises many kinds of errors
            raise CheckpointError(f"{part}: no such path, and not available from the hub: {error}") from None
