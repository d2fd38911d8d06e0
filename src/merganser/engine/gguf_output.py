"""Write a merge as a GGUF file, quantised by gguf or ggml, with settings and tokenizer of a GGUF model of the merge."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, select_rows, views
from merganser.checkpoints.gguf_file import GGUFFile
from merganser.checkpoints.gguf_model import GGUFModel
from merganser.checkpoints.sidecars import GGUFLayout
from merganser.engine.ggml import load_ggml, quantize_rows
from merganser.engine.merge import Merge
from merganser.engine.nested import Merged
from merganser.engine.plan import Output, Source
from merganser.engine.requantised import Requantised, replace_by_codes
from merganser.errors import InputError, require
from merganser.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT = "F32"
#: llama.cpp's `general.file_type` by the main type of a file.
_FILE_TYPES = {
    "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2, "q6_k": 18, "q5_k": 16, "q4_k": 14, "q3_k": 11, "q2_k": 10
}  # fmt: skip
#: Types of matrices whose rows are not a multiple of the 256 entries of a K-quant's block, as in llama.cpp but for
#: the last two, which become IQ4_NL there.
_NARROW = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "Q4_0", "Q2_K": "Q4_0"}
_MADE_BY = "merganser.fingerprint"


class GGUFEncoded(Requantised):
    """The result of a merge under GGUF's names, with matrices as blocks of codes.

    Args:
        merged: The result, under the names of transformers.
        model: A GGUF model of the merge, whose names, stacks of experts and order of rows are used.
        kind: The type of quantised matrices, such as "Q8_0".
        first: The first model of the merge, whose weights are quantised for comparison.
    """

    def __init__(self, merged: Checkpoint, model: GGUFModel, kind: str, first: Checkpoint) -> None:
        self._gguf: Any = require("gguf", "hf")
        self._model = model
        #: The weights in each tensor of the file: one, or the experts of a stack in their order.
        self._weights: dict[str, list[str]] = {}
        for name, place in model.places.items():
            if name in merged:
                self._weights.setdefault(place.tensor, []).append(name)
        kinds = [self._gguf.GGMLQuantizationType[each] for each in (kind, _NARROW.get(kind, kind))]
        self._coded: dict[str, Any] = {}
        for name in self._weights:
            *outer, width = self.shape(name)
            fitting = [each for each in kinds if width % self._gguf.GGML_QUANT_SIZES[each][0] == 0]
            if outer and fitting:
                self._coded[name] = fitting[0]
        rows = {name: math.prod(self.shape(name)[:-1]) for name in self._coded}
        super().__init__(merged, rows, first)

    def names(self) -> Sequence[str]:
        return list(self._weights)

    def kind(self, name: str) -> int:
        """Return the number of the GGUF type of a tensor."""
        return int(self._coded.get(name, self._gguf.GGMLQuantizationType[_FLOAT]))

    def kinds(self) -> Counter[str]:
        """Return how many matrices are written in each type."""
        return Counter(kind.name for kind in self._coded.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the file."""
        return self._model.file.spec(name).shape

    def spec(self, name: str) -> TensorSpec:
        shape = self.shape(name)
        if name not in self._coded:
            return TensorSpec(shape, "float32")
        block, size = self._gguf.GGML_QUANT_SIZES[self._coded[name]]
        return TensorSpec((math.prod(shape[:-1]), shape[-1] // block * size), "uint8")

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        span, shape = rows or (0, self.spec(name).shape[0]), self.shape(name)
        if name in self._coded:
            return self.encode_rows(name, span, self._rows(self.source, name, span))
        if len(shape) > 1:
            inner = math.prod(shape[1:-1])
            values = self._rows(self.source, name, (span[0] * inner, span[1] * inner)).reshape(-1, *shape[1:])
        else:
            (weight,) = self._weights[name]
            values = self._part(self.source, weight, (0, self.source.spec(weight).shape[0])).flatten()
            values = select_rows(values, span)
        self.check(name, values)
        return values

    def overhead(self, name: str, entries: int) -> int:
        width = math.prod(self.shape(name)[1:])
        return super().overhead(self._weights[name][0], entries * 4 + 2 * width)

    def encode(self, name: str, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kind = self._coded[name]
        if kind.name.endswith("_K"):
            codes = quantize_rows(values, kind).numpy()
        else:
            codes = self._gguf.quants.quantize(values.numpy(), kind)
        decoded = self._gguf.quants.dequantize(codes, kind)
        return torch.from_numpy(codes), torch.ones(len(values)), torch.from_numpy(np.ascontiguousarray(decoded))

    def sample(self, name: str, count: int) -> Tensor | None:
        weight = self._weights[name][0]
        if weight not in self.first or not self.first.spec(weight).element.is_floating_point:
            return None
        return self._part(self.first, weight, (0, min(count, self.first.spec(weight).shape[0])))

    def _rows(self, checkpoint: Checkpoint, name: str, rows: Rows) -> Tensor:
        """Return rows of a tensor of the file, those of a stack of experts following one another."""
        weights = self._weights[name]
        height = math.prod(self.shape(name)[:-1]) // len(weights)
        spans = [(max(0, rows[0] - i * height), min(height, rows[1] - i * height)) for i in range(len(weights))]
        parts = zip(weights, spans, strict=True)
        return torch.cat([self._part(checkpoint, weight, span) for weight, span in parts if span[0] < span[1]])

    def _part(self, checkpoint: Checkpoint, weight: str, rows: Rows) -> Tensor:
        return self._model.as_stored(weight, rows, lambda part: checkpoint.read(weight, part).to(torch.float32))


def quantise_to_gguf(merge: Merge, form: str) -> Merge:
    """Return a merge that is written as a GGUF file.

    Args:
        merge: What to merge; one of its models is a GGUF file, which gives settings and tokenizer.
        form: The type of quantised matrices, such as "q8_0".

    Returns:
        The same merge, quantised as it is written.

    Raises:
        InputError: If no model of the merge is a GGUF file of a known architecture, or the result does not fit it.
    """
    seen = (view for source in merge.sources for view in views(source))
    model = next((view for view in seen if isinstance(view, GGUFModel)), None)
    if model is None:
        raise InputError(
            f"output.quantize: {form} writes a GGUF file, which needs the settings and tokenizer of a GGUF "
            "model: add one of a known architecture to the models"
        )
    outputs = {output.name: output.spec.shape for output in merge.plan.outputs}
    tied = set(merge.plan.aliases) | ({"lm_head.weight"} - set(model.places))
    fits = {name: model.spec(name).shape for name in model.names()}
    if wrong := next(
        (name for name in {**fits, **outputs} if fits.get(name) != outputs.get(name) and name not in tied), None
    ):
        raise InputError(
            f"output.quantize: {form}: {wrong!r} is {outputs.get(wrong, 'not there')} in the merge and "
            f"{fits.get(wrong, 'not there')} in {model.label}, which gives the settings of the GGUF file"
        )
    if form.endswith("_k"):
        load_ggml()
    view = GGUFEncoded(Merged(merge, merge.plan.models[0].label), model, form.upper(), merge.sources[0])
    made = [Output(name, view.spec(name), "passthrough", (Source(0, name),)) for name in view.names()]
    tensors = {name: (view.shape(name), view.kind(name)) for name in view.names()}
    layout = GGUFLayout(str(model.file.path), _FILE_TYPES[form], tensors)
    told = replace(merge.plan.sidecars, gguf=layout)
    kinds = ", ".join(f"{count} matrices are written as {kind}" for kind, count in view.kinds().items())
    note = f"{kinds or 'no matrix is quantised'}, with the settings of {model.label}"
    whole = replace(merge.plan, aliases={})
    return replace_by_codes(Merge(whole, merge.sources), view, made, told, note)


def gguf_header(layout: GGUFLayout, fingerprint: str) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a GGUF file, the offset of each tensor in the file, and the file's size.

    Args:
        layout: The donor of the settings, and the tensors.
        fingerprint: The fingerprint of the merge, stored among the settings.
    """
    donor = GGUFFile(Path(layout.file)).header
    start, stop, count = donor.span
    with open(layout.file, "rb") as file:
        file.seek(start)
        settings = bytearray(file.read(stop - start))
    if "general.file_type" in donor.places:
        struct.pack_into("<I", settings, donor.places["general.file_type"] - start, layout.file_type)
    if fingerprint and _MADE_BY not in donor.settings:
        settings += _text(_MADE_BY) + struct.pack("<I", 8) + _text(fingerprint)
        count += 1
    sizes = {int(kind): size for kind, size in require("gguf", "hf").GGML_QUANT_SIZES.items()}
    tensors, offsets, at = bytearray(), {}, 0
    for name, (shape, kind) in layout.tensors.items():
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
