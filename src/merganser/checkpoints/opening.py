"""`open`: open any reference to weights as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from merganser.checkpoints.base import Checkpoint, is_integer
from merganser.checkpoints.directory import Directory, open_file
from merganser.checkpoints.kinds import LIBRARIES, SMALL_SUFFIXES, TORCH_SUFFIXES, is_adapter, is_distributed
from merganser.checkpoints.memory import Module, StateDict
from merganser.checkpoints.references import HUB_ID, exists, is_remote, parts
from merganser.checkpoints.submodules import is_index
from merganser.errors import CheckpointError, first_line, require
from merganser.excerpts import shorten
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import nn

Reference: TypeAlias = "str | os.PathLike[str] | Checkpoint | Mapping[str, Any] | nn.Module"
_HUB_FILES = [
    "*.safetensors",
    "pytorch_model*.bin",
    "*/pytorch_model.bin",
    *(f"*{suffix}" for suffix in SMALL_SUFFIXES),
]


def open(reference: Reference) -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Args:
        reference: A path (safetensors, torch or GGUF file, Hugging Face directory, torch distributed checkpoint, PEFT
            adapter directory, expert of a library), a hub id `owner/name[@revision]`, an address (`https://…`, `s3://…`,
            `gs://…`, `hf://owner/name`, read by ranges as it is needed), any of these followed by `+adapter`, a state
            dict, or a module.

    Returns:
        A lazy mapping from names to tensors.

    Raises:
        CheckpointError: If there is nothing at the reference, or it cannot be read.

    Example:
        >>> checkpoint = mg.open("math")
        >>> checkpoint["0.weight"].shape
        torch.Size([16, 8])
    """
    return _open(reference, ())


def _open(reference: Reference, over: tuple[Path, ...]) -> Checkpoint:
    """Open a reference on behalf of the adapters `over` it."""
    if isinstance(reference, Checkpoint):
        return reference
    if isinstance(reference, Mapping):
        return StateDict(reference)
    if not isinstance(reference, (str, os.PathLike)):
        if not isinstance(reference, torch.nn.Module):
            raise CheckpointError(
                f"cannot open a {type(reference).__name__} as a checkpoint; expected a path, a hub id, an nn.Module or "
                "a mapping from names to tensors"
            )
        return Module(reference)
    text = os.fspath(reference)
    first, *adapters = parts(text)
    opened = _open_remote(first, over) if is_remote(first) else _open_path(locate(first), over)
    return _apply_adapters(opened, adapters) if adapters else opened


def _apply_adapters(checkpoint: Checkpoint, adapters: Sequence[str]) -> Checkpoint:
    """Apply adapters to a checkpoint, the first one first."""
    from merganser.checkpoints.adapter import Adapted, open_adapter

    for adapter in adapters:
        below, checkpoint = checkpoint.label, Adapted(checkpoint, open_adapter(locate(adapter), checkpoint))
        if is_remote(adapter):
            checkpoint.label = f"{below}+{adapter}"  # not the directory it was downloaded to
    return checkpoint


def locate(reference: str) -> Path:
    """Return the local path of a reference: itself if it exists, else the hub's snapshot (respects offline mode)."""
    if is_remote(reference):
        from merganser.checkpoints.remote.models import fetch_adapter

        return fetch_adapter(reference)
    path = Path(os.path.expanduser(reference))
    if os.path.exists(path):  # not Path.exists, which raises on what is too long for a path
        return path
    if not HUB_ID.fullmatch(reference):
        raise CheckpointError(f"{shorten(reference, 200, 'start')}: no such file or directory")
    hub = require("huggingface_hub", "hf")
    repository, _, revision = reference.partition("@")
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many kinds of errors
        raise _explain_missing(reference, error) from None


def _explain_missing(reference: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{reference}: no such path, and not available from the hub: {first_line(error)}")


def open_headers(reference: str) -> Checkpoint:
    """Open a checkpoint for its headers only; hub models that are not cached are not downloaded.

    Args:
        reference: A reference for `open`, as text.

    Example:
        >>> len(open_headers("math"))
        6
    """
    found = []
    for part in parts(reference):
        if not exists(part) and HUB_ID.fullmatch(part) and not _is_here(part):
            from merganser.checkpoints.remote.models import fetch_small_files

            try:
                fetch_small_files(part := f"hf://{part}")
            except CheckpointError as error:
                raise _explain_missing(part.removeprefix("hf://"), error) from None
        found.append(part)
    return open("+".join(found))


def _is_here(reference: str) -> bool:
    """Return whether the hub's cache has a model with all its weights."""
    hub = require("huggingface_hub", "hf")
    repository, _, revision = reference.partition("@")
    try:
        _open_path(Path(hub.snapshot_download(repository, revision=revision or None, local_files_only=True)), ())
    except Exception:  # on any error it is read from the hub
        return False
    return True


def _open_remote(url: str, over: tuple[Path, ...]) -> Checkpoint:
    from merganser.checkpoints.remote.models import fetch_adapter, fetch_small_files, open_remote

    place = fetch_small_files(url.rstrip("/"))
    return _open_adapter(fetch_adapter(url), over, url) if is_adapter(place) else open_remote(url)


def _open_path(path: Path, over: tuple[Path, ...]) -> Checkpoint:
    root = path.parent.parent if path.parent.name == "experts" else path
    for mark, opener in LIBRARIES.items():
        if (root / mark).is_file():
            module, _, function = opener.partition(":")
            checkpoint: Checkpoint = getattr(import_module(module), function)(path)
            return checkpoint
    if path.is_dir():
        if is_adapter(path):
            return _open_adapter(path, over)
        if is_distributed(path):
            from merganser.checkpoints.distributed import DistributedCheckpoint

            return DistributedCheckpoint(path)
        return _decode(Directory(path))
    if path.suffix == ".gguf":
        from merganser.checkpoints.gguf_file import GGUFFile
        from merganser.checkpoints.gguf_model import open_gguf

        return open_gguf(GGUFFile(path))
    if path.suffix in (".safetensors", *TORCH_SUFFIXES):
        return _decode(open_file(path))
    if is_index(path.name):
        return _decode(Directory(path))
    known = ", ".join((".safetensors", ".gguf", *TORCH_SUFFIXES))
    raise CheckpointError(f"{path}: unknown file type; expected a directory or one of {known}")


def _decode(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose codes of known formats are read as weights; itself if it has no codes."""
    elements = {checkpoint.spec(name).element for name in checkpoint.names()}
    if not any(is_integer(element) or element.itemsize == 1 for element in elements):
        return checkpoint
    from merganser.checkpoints.dequantised import dequantise

    return dequantise(checkpoint)


def _open_adapter(path: Path, over: tuple[Path, ...], shown: str = "") -> Checkpoint:
    """Open an adapter that names its base; `shown` is the address that it was downloaded from."""
    from merganser.checkpoints.adapter import Adapted
    from merganser.checkpoints.adapter_file import AdapterFile

    place = path.resolve()
    shown = shown or str(path)
    if place in over:
        raise CheckpointError(f"{shown}: the adapter is its own base; write BASE+{shown}")
    adapter = AdapterFile(path)
    base = adapter.config.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(f"{shown}: an adapter without its base; write BASE+{shown}")
    adapted = Adapted(_open(str(base), (*over, place)), adapter)
    adapted.label = f"{adapted.source.label}+{shown}"
    return adapted
