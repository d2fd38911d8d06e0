"""Files that once did harm: each is tried in every run, before the damaged ones."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

import torch

HUGE = 1 << 62


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else _json(header)
    return len(text).to_bytes(8, "little") + text + data


def _gguf(tensors: int, settings: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + rest


def _deflated(size: int) -> bytes:
    """A torch archive of zeros, compressed to nearly nothing."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(size)}, plain)
    with zipfile.ZipFile(plain) as given, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
        for record in given.infolist():
            made.writestr(record.filename, given.read(record.filename))
    return packed.getvalue()


def _expanded() -> bytes:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2), "wide": torch.zeros(1).expand(1 << 40)}, stream)
    return stream.getvalue()


def _endless_name() -> bytes:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(2)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue().replace(b"ctorch._utils\n", b"ctorch._utils\n" + b'{"a":' * 20_000)


def _tokenizer(**ids: Any) -> bytes:
    return _json({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, **ids}, "merges": []}, "added_tokens": []})


SPAN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOLE = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
DEEP = b"[" * 100_000
REGEX = {"r": 2, "lora_alpha": 4, "rank_pattern": {"(([a-z0-9._]+)+)+!": 2}}

STORED: dict[str, dict[str, dict[str, bytes]]] = {
    "safetensors": {
        name: {"x.safetensors": content}
        for name, content in {
            "trailing bytes": _header({"a": SPAN}, b"x" * 9),
            "a hole": _header({"a": HOLE}, b"x" * 12),
            "a byte-order mark": _header(b"\xef\xbb\xbf" + _json({"a": SPAN}), b"x" * 8),
            "UTF-16": _header(json.dumps({"a": SPAN}).encode("utf-16"), b"x" * 8),
            "metadata of numbers": _header({"__metadata__": {"a": 1}, "a": SPAN}, b"x" * 8),
            "metadata as a list": _header({"__metadata__": [], "a": SPAN}, b"x" * 8),
            "no metadata": _header({"__metadata__": None, "a": SPAN}, b"x" * 8),
            "negative nought": _header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}', b"x" * 8),
            "a tensor called pt": _header({"__metadata__": {"format": "pt"}, "pt": SPAN}, b"x" * 8),
            "depth": _header(DEEP),
        }.items()
    },
    "index": {
        name: {"m/model.safetensors.index.json": content}
        for name, content in {
            "a way out": _json({"weight_map": {"a": "../precious.txt"}}),
            "a long name": _json({"weight_map": {"a": "x" * 5000}}),
            "a list": _json({"weight_map": {"a": ["s0.safetensors"]}}),
            "depth": b'{"weight_map": ' + DEEP,
        }.items()
    },
    "tokenizer": {
        name: {"a/tokenizer.json": content}
        for name, content in {
            "a negative id": _tokenizer(c=-1),
            "a huge id": _tokenizer(c=10**9),
            "an id twice": _tokenizer(c=0),
        }.items()
    },
    "vocabulary": {"a huge id": {"a/added_tokens.json": b'{"<x>": 1000000000}'}},
    "config": {"depth": {"a/config.json": DEEP}, "a key twice": {"a/config.json": b'{"a": 1, "a": 2}'}},
    "adapter": {"an exploding pattern": {"ad/adapter_config.json": _json(REGEX)}},
    "gguf": {
        name: {"m.gguf": content}
        for name, content in {
            "an endless array": _gguf(0, 1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, HUGE)),
            "endless settings": _gguf(0, HUGE, b""),
            "endless tensors": _gguf(HUGE, 0, b""),
        }.items()
    },
    "torch": {"a deflated archive": {"m.pt": _deflated(1 << 22)}, "an expanded tensor": {"m.pt": _expanded()}},
    "torch-legacy": {"an endless name": {"m.pt": _endless_name()}},
    "modules": {"a way out": {"s/modules.json": _json([{"path": "../.."}])}},
}
