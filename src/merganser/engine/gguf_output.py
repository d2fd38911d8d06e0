"""Write a merge as a GGUF file, quantised by gguf, with settings and tokenizer of a GGUF model of the merge."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View
from merganser.checkpoints.gguf_file import GGUFFile
from merganser.checkpoints.gguf_names import GGUFModel
from merganser.engine.merge import Merge
from merganser.engine.nested import Merged
from merganser.engine.plan import Output, Source
from merganser.engine.requantised import Requantised, quantised_merge
from merganser.errors import InputError, require
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT = "F32"
#: llama.cpp's `general.file_type` by the main type of a file.
_FILE_TYPES = {"q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}
_MADE_BY = "merganser.fingerprint"


class GGUFEncoded(Requantised):
    """The result of a merge under GGUF's names, with matrices as blocks of codes.

    Args:
        merged: The result, under the names of transformers.
        model: A GGUF model of the merge, whose names and order of rows are used.
        kind: The type of quantised matrices, such as "Q8_0".
    """

    def __init__(self, merged: Checkpoint, model: GGUFModel, kind: str) -> None:
        self._gguf: Any = require("gguf", "hf")
        self._kind = self._gguf.GGMLQuantizationType[kind]
        self._block, self._bytes = self._gguf.GGML_QUANT_SIZES[self._kind]
        self._model = model
        self._names = {stored: name for name, stored in model.stored.items() if name in merged}
        coded = {stored: merged.spec(name) for stored, name in self._names.items()}
        rows = {
            stored: spec.shape[0]
            for stored, spec in coded.items()
            if len(spec.shape) == 2 and spec.shape[1] % self._block == 0
        }
        super().__init__(merged, rows, View(model.file, model.label))

    def names(self) -> Sequence[str]:
        return list(self._names)

    def kind(self, name: str) -> int:
        """Return the number of the GGUF type of a tensor."""
        return int(self._kind if name in self.ledger else self._gguf.GGMLQuantizationType[_FLOAT])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return self.source.spec(self._names[name]).shape

    def spec(self, name: str) -> TensorSpec:
        shape = self.shape(name)
        if name not in self.ledger:
            return TensorSpec(shape, "float32")
        return TensorSpec((shape[0], shape[1] // self._block * self._bytes), "uint8")

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        inner = self._names[name]
        span = rows or (0, self.shape(name)[0])
        values = self._model.as_stored(inner, span, lambda part: self.source.read(inner, part).to(torch.float32))
        if name in self.ledger:
            return self.encode_rows(name, span, values)
        self.check(name, values)
        return values

    def overhead(self, name: str, entries: int) -> int:
        width = math.prod(self.shape(name)[1:])
        return super().overhead(self._names[name], entries * 4 + 2 * width)

    def encode(self, name: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = self._gguf.quants.quantize(values.numpy(), self._kind)
        decoded = self._gguf.quants.dequantize(codes, self._kind)
        return torch.from_numpy(codes), torch.ones(len(values)), torch.from_numpy(np.ascontiguousarray(decoded))


def in_gguf(merge: Merge, form: str) -> Merge:
    """Return a merge that is written as a GGUF file.

    Args:
        merge: What to merge; one of its models is a GGUF file, which gives settings and tokenizer.
        form: The type of quantised matrices, such as "q8_0".

    Returns:
        The same merge, quantised as it is written.

    Raises:
        InputError: If no model of the merge is a GGUF file of a known architecture, or the result does not fit it.
    """
    model = next((found for source in merge.sources if (found := _gguf_model(source)) is not None), None)
    if model is None:
        raise InputError(
            f"output.quantize: {form} writes a GGUF file, which needs the settings and tokenizer of a GGUF "
            "model: add one of a known architecture to the models"
        )
    outputs = {output.name: output.spec.shape for output in merge.plan.outputs}
    tied = set(merge.plan.aliases) | ({"lm_head.weight"} - set(model.stored))
    fits = {name: model.spec(name).shape for name in model.names()}
    if wrong := next(
        (name for name in {**fits, **outputs} if fits.get(name) != outputs.get(name) and name not in tied), None
    ):
        raise InputError(
            f"output.quantize: {form}: {wrong!r} is {outputs.get(wrong, 'not there')} in the merge and "
            f"{fits.get(wrong, 'not there')} in {model.label}, which gives the settings of the GGUF file"
        )
    view = GGUFEncoded(Merged(merge, merge.plan.models[0].label), model, form.upper())
    made = [Output(name, view.spec(name), "passthrough", (Source(0, name),)) for name in view.names()]
    header = {
        "file": str(model.file.path),
        "file_type": _FILE_TYPES[form],
        "tensors": {name: [list(view.shape(name)), view.kind(name)] for name in view.names()},
    }
    told = replace(merge.plan.sidecars, gguf=header)
    note = f"{len(view.ledger.names())} matrices are written as {form.upper()}, with the settings of {model.label}"
    whole = replace(merge.plan, aliases={})
    return quantised_merge(Merge(whole, merge.sources), view, made, told, note)


def _gguf_model(checkpoint: Checkpoint) -> GGUFModel | None:
    while isinstance(checkpoint, View):
        if isinstance(checkpoint, GGUFModel):
            return checkpoint
        checkpoint = checkpoint.source
    return None


def gguf_header(told: Mapping[str, Any], fingerprint: str) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a GGUF file, the offset of each tensor in the file, and the file's size.

    Args:
        told: The donor of the settings, `general.file_type`, and shape and type of each tensor.
        fingerprint: The fingerprint of the merge, stored among the settings.
    """
    donor = GGUFFile(Path(told["file"])).header
    start, stop, count = donor.span
    with open(told["file"], "rb") as file:
        file.seek(start)
        settings = bytearray(file.read(stop - start))
    if "general.file_type" in donor.places:
        struct.pack_into("<I", settings, donor.places["general.file_type"] - start, told["file_type"])
    if fingerprint and _MADE_BY not in donor.settings:
        settings += _text(_MADE_BY) + struct.pack("<I", 8) + _text(fingerprint)
        count += 1
    sizes = {int(kind): size for kind, size in require("gguf", "hf").GGML_QUANT_SIZES.items()}
    tensors, offsets, at = bytearray(), {}, 0
    for name, (shape, kind) in told["tensors"].items():
        offsets[name] = at
        tensors += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, at)
        block, size = sizes[kind]
        at += math.prod(shape) // block * size
        at += -at % donor.alignment
    header = b"GGUF" + struct.pack("<IQQ", 3, len(offsets), count) + bytes(settings) + bytes(tensors)
    header += b"\0" * (-len(header) % donor.alignment)
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + at


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
