"""What lies in a folder: checkpoints, libraries, studies, recipes, questions. Only headers are read."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merganser.checkpoints.safetensors_file import DTYPES
from merganser.engine.origin import LOCK_FILE
from merganser.strict_json import parse_json
from merganser.studio.files import read_object
from merganser.studio.questions import guess_kind
from merganser.studio.roots import Outside, Roots

DEEPEST, MOST = 6, 2000
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_MODEL = re.compile(r"(model|pytorch_model|adapter_model).*\.(safetensors|bin)$")
_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True)
class Item:
    """An item to open: its kind, its path for the page, bytes, time of the last change, and facts about it."""

    kind: str
    path: str
    bytes: int
    modified: float
    facts: dict[str, Any] = field(default_factory=dict)


def discover(roots: Roots) -> list[Item]:
    """Return everything under the directories that the studio can open, the latest first."""
    found = [item for root in roots.directories for item in _walk(roots, root, DEEPEST)]
    unique = {item.path: item for item in found[:MOST]}
    return sorted(unique.values(), key=lambda item: -item.modified)


def _walk(roots: Roots, directory: Path, depth: int) -> Iterator[Item]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    inside = [entry for entry in entries if not entry.name.startswith(".") and _is_allowed(roots, entry)]
    files = {entry.name: Path(entry.path) for entry in inside if entry.is_file()}
    kind = _classify_directory(files)
    if kind is not None:
        weights = [path for name, path in files.items() if name.endswith(_WEIGHTS)]
        within = _find_files(directory) if kind == "library" else []
        yield _describe_item(roots, kind, directory, within or weights or list(files.values()), files)
    for name, path in files.items():
        if (file_kind := _classify_file(path, kind)) is not None:
            yield _describe_item(roots, file_kind, path, [path], {name: path})
    if kind in (None, "alignment") and depth:
        for entry in inside:
            if entry.is_dir() and not entry.name.endswith(".partial"):
                yield from _walk(roots, Path(entry.path), depth - 1)


def _find_files(directory: Path) -> list[Path]:
    """Return the files of a directory and of those inside it; links to directories are not followed."""
    return [Path(place, name) for place, _, names in os.walk(directory) for name in names]


def _is_allowed(roots: Roots, entry: os.DirEntry[str]) -> bool:
    if not entry.is_symlink():
        return True
    try:
        roots.find(entry.path)
    except Outside:
        return False
    return entry.is_file()  # a linked directory may lead back here


def _classify_directory(files: dict[str, Path]) -> str | None:
    for name, kind in (
        ("library.json", "library"),
        ("masks.json", "library"),
        ("permutations.safetensors", "alignment"),
    ):
        if name in files:
            return kind
    if any(name.startswith("adapter_model.") for name in files):
        return "adapter"
    weights = any(name.endswith(_WEIGHTS) for name in files)
    return "checkpoint" if weights and ("config.json" in files or any(map(_MODEL.match, files))) else None


def _classify_file(path: Path, inside: str | None) -> str | None:
    if path.suffix == ".sqlite":
        return "study"
    if path.name.endswith(".sweep.jsonl"):
        return "sweep"
    if path.suffix in (".yml", ".yaml") and inside is None:
        return _classify_yaml(path)
    if path.suffix == ".jsonl" and inside is None and guess_kind(path):
        return "questions"
    return "checkpoint" if path.suffix in _WEIGHTS and inside is None else None


def _classify_yaml(path: Path) -> str | None:
    """Recognise a recipe, or the run file of a search, by the keys at the start of its lines."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(1 << 16)
    except (OSError, UnicodeDecodeError):
        return None
    keys = set(re.findall(r"^(\w+)\s*:", text, re.M))
    if {"space", "tasks"} <= keys:
        return "run"
    return "recipe" if keys & {"method", "merge_method", "expression"} else None


def _describe_item(roots: Roots, kind: str, path: Path, counted: list[Path], files: dict[str, Path]) -> Item:
    stats = [file.stat() for file in counted if file.exists()]  # a job may be removing what it finds here
    facts = _describe_facts(kind, counted, files)
    size, latest = sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
    return Item(kind, roots.show(path), size, latest, facts)


def _describe_facts(kind: str, counted: list[Path], files: dict[str, Path]) -> dict[str, Any]:
    if kind in ("checkpoint", "adapter"):
        merged = {"merged": True} if kind == "checkpoint" and LOCK_FILE in files else {}
        return _read_weight_facts(counted) | _read_config_facts(files.get("config.json")) | merged
    if kind == "questions":
        return {"kind": guess_kind(counted[0])}
    if kind == "library" and "library.json" in files:
        experts = read_object(files["library.json"]).get("experts")
        return {"experts": list(experts) if isinstance(experts, dict) else []}
    return {}


def _read_config_facts(path: Path | None) -> dict[str, Any]:
    """Return what a config says about the network; `live` if it can generate text in the mixer."""
    if path is None:
        return {}
    config = read_object(path)
    names = config.get("architectures") or [""]
    name = names[0] if isinstance(names, list) and isinstance(names[0], str) else ""
    found = {"architecture": name, "layers": config.get("num_hidden_layers"), "live": name.endswith("ForCausalLM")}
    return {key: value for key, value in found.items() if value not in ("", None)}


def _read_weight_facts(files: list[Path]) -> dict[str, Any]:
    """Return parameters and dtypes, from the headers of safetensors files; `damaged` if one is cut short."""
    parameters, dtypes, damaged = 0, set(), False
    for path in files:
        if path.suffix != ".safetensors":
            return {}
        header, room = _read_header(path)
        damaged |= room < 0
        for name, entry in header.items():
            shape = entry.get("shape") if name != "__metadata__" and isinstance(entry, dict) else None
            if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
                parameters += math.prod(shape)
                code = str(entry.get("dtype"))
                dtypes.add(DTYPES.get(code, code))
                damaged |= _end(entry) > room
    found = {"parameters": parameters, "dtypes": sorted(dtypes)} if dtypes else {}
    return found | ({"damaged": True} if damaged else {})


def _end(entry: dict[str, Any]) -> int:
    """Return where the bytes of a tensor end, from the end of the header."""
    offsets = entry.get("data_offsets")
    return offsets[-1] if isinstance(offsets, list) and offsets and isinstance(offsets[-1], int) else 0


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the number of bytes after it, which is negative if it has none."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found = parse_json(file.read(length)) if length <= _HEADER_LIMIT else None
            room = path.stat().st_size - 8 - length
    except OSError:  # a job may be removing it
        return {}, 0
    except ValueError:
        return {}, -1
    return (found, room) if isinstance(found, dict) else ({}, -1)
