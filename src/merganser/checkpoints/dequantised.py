"""A quantised checkpoint under ordinary names and shapes, decoded while it is read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View
from merganser.checkpoints.codecs.base import Codec, StoredCodes
from merganser.checkpoints.codecs.formats import Format, find_codecs
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.quantised import note_quantised
from merganser.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Entries that are decoded at once, and the bytes per entry that this takes besides the result.
_CHUNK, _SCRATCH = 1 << 20, 24
#: Scales of activations and of the key-value cache, and format markers, which do not belong to a weight.
_UNUSED = re.compile(
    r"(^|\.)((input|output|activation|[qkv])_(scale|zero_point)|input_(scale_inv|global_scale|amax)|scale_input|"
    r"weight_format)$"
)
_FLOATS = ("bfloat16", "float16", "float32")


def dequantise(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose codes of known formats are read as weights.

    Args:
        checkpoint: Any checkpoint, as stored.

    Returns:
        A view, or the checkpoint itself if it has no codes of a known format.

    Raises:
        CheckpointError: If codes do not fit their scales.

    Example:
        >>> dequantise(mg.open("math"))
        <SafetensorsFile math/model.safetensors: 6 tensors, ...>  # doctest: +SKIP
    """
    config = read_config(checkpoint.directory)
    found = find_codecs(StoredCodes(checkpoint, _read_settings(config)))
    return Dequantised(checkpoint, found, _dtype(config)) if found else checkpoint


class Dequantised(View):
    """A checkpoint whose weights are decoded to float32, some rows at a time; the spec has the dtype to write.

    Args:
        source: The checkpoint as stored.
        codecs: The quantised weights by name, each with its format.
        dtype: The nominal dtype of the weights.
    """

    def __init__(self, source: Checkpoint, codecs: Mapping[str, tuple[Format, Codec]], dtype: str) -> None:
        super().__init__(source, source.label)
        self.forms = Counter(form.name for form, _ in codecs.values())
        self._codecs = {name: codec for name, (_, codec) in codecs.items()}
        self._dtype = dtype
        places = {codec.stored[0]: name for name, codec in self._codecs.items()}
        hidden = {name for codec in self._codecs.values() for name in codec.stored}
        stored = [name for name in source.names() if name in places or name not in hidden]
        unused = {name for name in stored if _UNUSED.search(name) and source.spec(name).numel == 1}
        self._names = [places.get(name, name) for name in stored if name not in unused]

    def names(self) -> Sequence[str]:
        return self._names

    def spec(self, name: str) -> TensorSpec:
        codec = self._find_codec(name)
        return self.source.spec(name) if codec is None else TensorSpec(codec.shape, self._dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        codec = self._find_codec(name)
        if codec is None:
            return self.source.read(name, rows)
        first, last = (0, codec.shape[0]) if rows is None else rows
        step = max(1, _CHUNK // math.prod(codec.shape[1:]))
        if last - first <= step:
            return codec.decode((first, last))
        found = torch.empty((last - first, *codec.shape[1:]), dtype=torch.float32)
        for start in range(first, last, step):
            stop = min(start + step, last)
            found[start - first : stop - first] = codec.decode((start, stop))
        return found

    def overhead(self, name: str, entries: int) -> int:
        codec = self._find_codec(name)
        if codec is None:
            return super().overhead(name, entries)
        return 4 * entries + _SCRATCH * max(_CHUNK, math.prod(codec.shape[1:]))

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        codec = self._find_codec(name)
        if codec is None:
            super().prefetch(name, rows)
        elif rows is None or self.source.spec(codec.stored[0]).shape[:1] == codec.shape[:1]:
            self.source.prefetch(codec.stored[0], rows)

    def notes(self) -> list[str]:
        return [note_quantised(self.label, self.forms), *super().notes()]

    def _find_codec(self, name: str) -> Codec | None:
        return self._codecs.get(self.source.resolve_alias(name))


def _walk_sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config, then that of its language part."""
    yield config
    if isinstance(inner := config.get("text_config"), dict):
        yield inner


def _read_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for section in _walk_sections(config):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := section.get(key), dict):
                return found
    return {}


def _dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a config gives the weights; bfloat16 if it gives none."""
    said = [section.get(key) for section in _walk_sections(config) for key in ("dtype", "torch_dtype")]
    return next((each for each in said if each in _FLOATS), "bfloat16")
