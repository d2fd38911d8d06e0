"""Kinds of checkpoints, told apart by the names of their files, so that a reader is imported only for its kind."""

from __future__ import annotations

from pathlib import Path

#: Suffixes of files that torch writes.
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
#: Suffixes of the files beside the weights: configs, tokenizers, templates, cards, code.
SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md", ".tiktoken", ".spm", ".codes", ".py")
#: The config in the directory of a PEFT adapter.
ADAPTER_CONFIG = "adapter_config.json"
#: Files that mark a library of experts -> the functions that open one of them, which later packages define.
LIBRARIES = {
    "library.json": "merganser.library.library:open_expert",
    "masks.json": "merganser.library.masks:open_expert",
}
#: Lists the tensors of a torch distributed checkpoint.
DISTRIBUTED_METADATA = ".metadata"


def is_adapter(path: Path) -> bool:
    """Return whether a path is the directory of a PEFT adapter."""
    return (path / ADAPTER_CONFIG).is_file()


def is_library(path: Path) -> bool:
    """Return whether a path is the directory of a library of experts."""
    return any((path / mark).is_file() for mark in LIBRARIES)


def is_distributed(path: Path) -> bool:
    """Return whether a path is a torch distributed checkpoint."""
    return (path / DISTRIBUTED_METADATA).is_file()
