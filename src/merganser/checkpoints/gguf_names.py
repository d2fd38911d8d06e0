"""A GGUF file under the names and in the weight layout of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View, select_rows
from merganser.checkpoints.gguf_file import GGUFFile
from merganser.errors import CheckpointError, require

if TYPE_CHECKING:
    from torch import Tensor

_OUTER = ("model.embed_tokens", "model.norm", "lm_head")
_INNER = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
    "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
#: Names that differ in an architecture: its up projection contains the gate.
_RENAMED = {"phi3": {"mlp.up_proj": "mlp.gate_up_proj"}}
#: Architectures whose tensors equal those of transformers except for names, and the changes to some of them: rows of
#: queries and keys are in the order of rotary pairs, or the norm weight includes the 1 of "1 + weight".
_ARCHITECTURES = {
    "llama": "rotary", "mistral": "rotary", "qwen2": "", "qwen3": "", "phi3": "",
    "gemma": "norms", "gemma2": "norms", "gemma3": "norms",
}  # fmt: skip
#: Tensors that libraries compute from the config.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hugging_face_names(file: GGUFFile) -> dict[str, str]:
    """Return the transformers names of the tensors of a GGUF file: transformers name -> name in the file.

    Empty for an unknown architecture, or if a tensor of the file has no known name.
    """
    settings = file.header.settings
    name = settings.get("general.architecture")
    layers = settings.get(f"{name}.block_count")
    if name not in _ARCHITECTURES or not isinstance(layers, int) or layers > len(file.names()):
        return {}
    gguf = require("gguf", "hf")
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    if name not in kinds:
        return {}
    table = gguf.get_tensor_name_map(kinds[name], layers)
    inner = [_RENAMED.get(str(name), {}).get(each, each) for each in _INNER]
    modules = [*_OUTER, *(f"model.layers.{layer}.{each}" for layer in range(layers) for each in inner)]
    found: dict[str, str] = {}
    for module in modules:
        for end in (".weight", ".bias"):
            stored = table.get_name(module + end, try_suffixes=(end,))
            if stored in file:
                found[module + end] = stored
    return found if sorted({*file.names()} - {*_COMPUTED}) == sorted(found.values()) else {}


class GGUFModel(View):
    """A GGUF file as transformers would store the model.

    Args:
        file: The file.
        names: Names in transformers -> names in the file, as `hugging_face_names` returns them.
    """

    def __init__(self, file: GGUFFile, names: Mapping[str, str]) -> None:
        super().__init__(file, file.label)
        self.file = file
        self.stored = dict(names)
        self._change = _ARCHITECTURES[str(file.header.settings["general.architecture"])]
        self._heads = _rotary_heads(file, self.stored) if self._change == "rotary" else {}
        matrices = Counter(file.kind(name) for name in self.stored.values() if len(file.spec(name).shape) > 1)
        usual = matrices.most_common(1)[0][0] if matrices else "F32"
        self._dtype = {"F32": "float32", "F16": "float16"}.get(usual, "bfloat16")

    def names(self) -> Sequence[str]:
        return list(self.stored)

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(self.file.spec(self._find(name)).shape, self._dtype)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self._find(name)
        if self._change == "norms" and "norm" in name:
            return self.file.read(stored, rows) - 1
        heads = self.heads(name)
        if not heads:
            return self.file.read(stored, rows)
        size = self.spec(name).shape[0] // heads
        first, last = (0, heads * size) if rows is None else rows
        start = first // size * size
        read = self.file.read(stored, (start, -(-last // size) * size))
        paired = read.reshape(-1, size // 2, 2, *read.shape[1:]).transpose(1, 2).flatten(0, 2)
        return select_rows(paired, (first - start, last - start))

    def as_stored(self, name: str, rows: Rows, read: Callable[[Rows], Tensor]) -> Tensor:
        """Return rows of a weight as the file stores them.

        Args:
            name: The weight's name in transformers.
            rows: The rows of the stored weight.
            read: Returns rows of the weight in the layout of transformers.
        """
        if self._change == "norms" and "norm" in name:
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

    def overhead(self, name: str, entries: int) -> int:
        own = self.file.overhead(self._find(name), entries)
        return own + 8 * entries if self.heads(name) or self._change == "norms" else own

    def prefetch(self, name: str, rows: Rows | None = None) -> None:
        self.file.prefetch(self._find(name), rows)

    def _find(self, name: str) -> str:
        if name not in self.stored:
            raise self.missing(name)
        return self.stored[name]


def _rotary_heads(file: GGUFFile, names: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of heads of queries and keys, which divide their rows into pairs."""
    settings = file.header.settings
    prefix = f"{settings['general.architecture']}.attention.head_count"
    heads = settings.get(prefix, 0)
    found: dict[str, int] = {}
    for module, count in (("q_proj", heads), ("k_proj", settings.get(f"{prefix}_kv", heads))):
        for stored in (each for name, each in names.items() if name.split(".")[-2] == module):
            rows = file.spec(stored).shape[0]
            if not isinstance(count, int) or count < 1 or rows % (2 * count):
                raise CheckpointError(f"{file.label}: {stored!r} has {rows} rows, but its settings have {count} heads")
            found[module] = count
    return found


def open_gguf(file: GGUFFile) -> Checkpoint:
    """Return a GGUF file under the names of transformers, or unchanged if these are unknown."""
    names = hugging_face_names(file)
    return GGUFModel(file, names) if names else file
