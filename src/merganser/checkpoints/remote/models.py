"""Remote models: small files are downloaded to a temporary directory, weights are read by ranges.

The modules of sentence-transformers after the first (`2_Dense`) are small, and count as small files.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.directory import Directory, check_index, prefix_folder, weight_files
from merganser.checkpoints.directory import open_file as open_local
from merganser.checkpoints.kinds import SMALL_SUFFIXES, is_adapter
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.remote.downloads import new_directory
from merganser.checkpoints.remote.files import PARALLEL, check_url, fetch, is_http, open_file, open_store
from merganser.checkpoints.remote.tensors import RemoteSafetensors
from merganser.checkpoints.submodules import CHOICES, MODULE_WEIGHTS, MODULES, module_folders, module_weights
from merganser.confine import confine
from merganser.errors import CheckpointError, first_line

#: Files that a model may have beside its weights, for servers that do not list them.
_NAMES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    MODULES,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "model_index.json",
    "adapter_config.json",
    "merganser.lock.json",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
)
_LARGEST = 1 << 27
_LARGEST_MODULE = 1 << 30
_LARGEST_ADAPTER = 1 << 33
_ADAPTER = "adapter_model.safetensors"


def open_remote(url: str) -> Checkpoint:
    """Open a model by its address. Headers are read now, weights when they are needed.

    Args:
        url: The address of a safetensors file or of a model directory: `https://host/models/math`,
            `s3://bucket/math`, `gs://bucket/math`, `hf://owner/name[@revision]`.

    Raises:
        CheckpointError: If there is no model, or it cannot be read by ranges.
    """
    single = url.endswith(".safetensors")
    home = url.rpartition("/")[0] if single else url.rstrip("/")
    place = fetch_small_files(home)
    if single:
        return _open_weights(url, place)
    return Directory(place, _open_shards(place, home) | _open_modules(place, home), url)


def _open_shards(place: Path, home: str) -> dict[str, Checkpoint]:
    """Open the files that a local directory would be read from."""
    for name in CHOICES:
        if name.endswith(".safetensors.index.json") and (place / name).is_file():
            return _open_indexed(place / name, home)
        if name.endswith(".safetensors"):
            with suppress(FileNotFoundError):
                return {name: RemoteSafetensors(open_file(_join(home, name)), place)}
    raise CheckpointError(
        f"{home}: has no model.safetensors and no index; other formats cannot be read remotely: download the model"
    )


def _open_indexed(index: Path, home: str) -> dict[str, Checkpoint]:
    files = sorted(weight_files(index))
    with ThreadPoolExecutor(PARALLEL) as pool:
        opened = pool.map(lambda file: _open_weights(_join(home, file), index.parent), files)
        shards = dict(zip(files, opened, strict=True))
    check_index(index, shards)
    return shards


def _open_modules(place: Path, home: str) -> dict[str, Checkpoint]:
    """Open the weights of modules, which were fetched, under their addresses."""
    found: dict[str, Checkpoint] = {}
    for folder, file in module_weights(place).items():
        weights = StateDict(open_local(file), _join(home, f"{folder}/{file.name}"))
        found |= prefix_folder(folder, {file.name: weights})
    return found


def _open_weights(url: str, place: Path) -> Checkpoint:
    try:
        return RemoteSafetensors(open_file(url), place)
    except FileNotFoundError:
        raise CheckpointError(f"{url}: no such file") from None


def fetch_adapter(url: str) -> Path:
    """Download an adapter, which is small, to a directory that is removed when the process ends."""
    place = fetch_small_files(url.rstrip("/"))
    if is_adapter(place) and not (place / _ADAPTER).is_file():
        try:
            (place / _ADAPTER).write_bytes(fetch(_join(url.rstrip("/"), _ADAPTER), _LARGEST_ADAPTER))
        except FileNotFoundError:
            raise CheckpointError(f"{url}: has an adapter_config.json but no {_ADAPTER}") from None
    return place


def _join(home: str, name: str) -> str:
    return f"{home}/{quote(name) if is_http(home) else name}"


@lru_cache(maxsize=256)
def fetch_small_files(home: str) -> Path:
    """Return a directory with the files beside a model's weights, and those of modules in folders; it is removed when
    the process ends.
    """
    check_url(home)
    place = new_directory()

    def take(name: str, limit: int = _LARGEST) -> bool:
        path = confine(place, name, home)
        try:
            content = fetch(_join(home, name), limit)
        except FileNotFoundError:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return True

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(take, _names_at(home)))
    for folder in module_folders(place):
        take(f"{folder}/config.json")
        any(take(f"{folder}/{name}", _LARGEST_MODULE) for name in MODULE_WEIGHTS)
    return place


def _names_at(home: str) -> Iterable[str]:
    if is_http(home):
        return _NAMES
    store, path = open_store(home)
    try:
        listed = store.ls(path, detail=False)
    except FileNotFoundError:
        raise CheckpointError(f"{home}: no such directory") from None
    except Exception as error:  # clients raise many kinds of errors
        raise CheckpointError(f"{home}: cannot be listed: {first_line(error)}") from None
    names = (str(each).rpartition("/")[2] for each in listed)
    return [name for name in names if name.endswith(SMALL_SUFFIXES)]
