"""A GGUF file under the names and in the weight layout of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, select_rows
from merganser.checkpoints.gguf_file import GGUFFile
from merganser.checkpoints.gguf_names import ROTARY, SHIFTED, GGUFPlace, gguf_family, hugging_face_names
from merganser.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


class GGUFModel(View):
    """A GGUF file as transformers would store the model.

    Args:
        file: The file.
        places: Where the file stores each weight, as `hugging_face_names` returns it.
    """

    def __init__(self, file: GGUFFile, places: Mapping[str, GGUFPlace]) -> None:
        super().__init__(file, file.label)
        self.file = file
        self.places = dict(places)
        self.family = str(gguf_family(file))
        self._heads = _rotary_heads(self) if self.family in ROTARY else {}
        tensors = {place.tensor for place in self.places.values()}
        matrices = Counter(file.kind(name) for name in sorted(tensors) if len(file.spec(name).shape) > 1)
        usual = matrices.most_common(1)[0][0] if matrices else "F32"
        self._dtype = {"F32": "float32", "F16": "float16"}.get(usual, "bfloat16")

    def names(self) -> Sequence[str]:
        return list(self.places)

    def spec(self, name: str) -> TensorSpec:
        place = self.place(name)
        shape = self.file.spec(place.tensor).shape
        if place.expert is not None:
            shape = shape[1:]
        elif name.endswith(".shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)  # a Linear with one output, stored as a vector
        return TensorSpec(shape, self._dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        first, last = rows or (0, self.spec(name).shape[0])
        heads = self.heads(name)
        if not heads:
            values = self._stored(name, (first, last))
            return values - 1 if self._shift(name) else values
        size = self.spec(name).shape[0] // heads
        start = first // size * size
        read = self._stored(name, (start, -(-last // size) * size))
        paired = read.reshape(-1, size // 2, 2, *read.shape[1:]).transpose(1, 2).flatten(0, 2)
        return select_rows(paired, (first - start, last - start))

    def as_stored(self, name: str, rows: Rows, read: Callable[[Rows], Tensor]) -> Tensor:
        """Return rows of a weight as the file stores them.

        Args:
            name: The weight's name in transformers.
            rows: The rows of the stored weight.
            read: Returns rows of the weight in the layout of transformers.
        """
        if self._shift(name):
            return read(rows) + 1
        heads = self.heads(name)
        if not heads:
            return read(rows)
        size = self.spec(name).shape[0] // heads
        start = rows[0] // size * size
        found = read((start, -(-rows[1] // size) * size))
        paired = found.reshape(-1, 2, size // 2, *found.shape[1:]).transpose(1, 2).flatten(0, 2)
        return select_rows(paired, (rows[0] - start, rows[1] - start)).contiguous()

    def heads(self, name: str) -> int:
        """Return the number of heads of a tensor whose rows are stored in the order of rotary pairs; 0 for others."""
        return self._heads.get(name.split(".")[-2], 0)

    def place(self, name: str) -> GGUFPlace:
        """Return where the file stores a weight."""
        if name not in self.places:
            raise self.missing(name)
        return self.places[name]

    def overhead(self, name: str, entries: int) -> int:
        own = self.file.overhead(self.place(name).tensor, entries)
        return own + 8 * entries if self.heads(name) or self._shift(name) else own

    def _stored(self, name: str, rows: Rows) -> Tensor:
        place, shape = self.place(name), self.spec(name).shape
        if len(shape) < 2:
            return self.file.read(place.tensor, rows)
        start = (place.expert or 0) * shape[0]
        return self.file.read_flat(place.tensor, (start + rows[0], start + rows[1]))

    def _shift(self, name: str) -> bool:
        return self.family in SHIFTED and "norm" in name


def _rotary_heads(model: GGUFModel) -> dict[str, int]:
    """Return the numbers of heads of queries and keys, which divide their rows into pairs."""
    settings = model.file.header.settings
    prefix = f"{settings['general.architecture']}.attention.head_count"
    heads = settings.get(prefix, 0)
    found: dict[str, int] = {}
    for module, count in (("q_proj", heads), ("k_proj", settings.get(f"{prefix}_kv", heads))):
        for name, place in model.places.items():
            if name.split(".")[-2] != module:
                continue
            rows = model.file.spec(place.tensor).shape[0]
            if not isinstance(count, int) or count < 1 or rows % (2 * count):
                raise CheckpointError(
                    f"{model.label}: {place.tensor!r} has {rows} rows, but its settings have {count} heads"
                )
            found[module] = count
    return found


def open_gguf(file: GGUFFile) -> Checkpoint:
    """Return a GGUF file under the names of transformers, or unchanged if these are unknown."""
    places = hugging_face_names(file)
    return GGUFModel(file, places) if places else file
