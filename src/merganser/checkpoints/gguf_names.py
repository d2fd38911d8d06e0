"""The names that transformers gives to the tensors of GGUF files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from merganser.checkpoints.gguf_file import GGUFFile
from merganser.errors import require

_OUTER = ("model.embed_tokens", "model.norm", "lm_head")
_INNER = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
    "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_MIXTURE = (
    "mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj",
    "mlp.shared_expert_gate", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj",
)  # fmt: skip
_MIXTRAL = (
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w2",
    "block_sparse_moe.experts.{}.w3",
)  # fmt: skip
#: Names that differ in a family: its up projection contains the gate.
_RENAMED = {"phi3": {"mlp.up_proj": "mlp.gate_up_proj"}}
#: The `model_type` of transformers for each architecture of GGUF whose tensors equal those of transformers except for
#: names and the changes below. Mixtral has the architecture of Llama, with experts.
_FAMILIES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe",
}  # fmt: skip
#: Families whose rows of queries and keys are in the order of rotary pairs in GGUF.
ROTARY = ("llama", "mistral", "mixtral")
#: Families whose norm weights include the 1 of "1 + weight" in GGUF.
SHIFTED = ("gemma", "gemma2", "gemma3_text")
#: Tensors that libraries compute from the config.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class GGUFPlace:
    """Where a GGUF file stores a weight: a tensor, and the index in it if the tensor is a stack of experts."""

    tensor: str
    expert: int | None = None


def gguf_family(file: GGUFFile) -> str | None:
    """Return the `model_type` that transformers uses for the model in a GGUF file; None if it is not known here."""
    settings = file.header.settings
    architecture = str(settings.get("general.architecture"))
    if architecture == "llama" and settings.get("llama.expert_count"):
        return "mixtral"
    return _FAMILIES.get(architecture)


def hugging_face_names(file: GGUFFile) -> dict[str, GGUFPlace]:
    """Return where a GGUF file stores each weight, by the weight's name in transformers.

    Empty for an unknown architecture, or if a tensor of the file has no known name.
    """
    family, settings = gguf_family(file), file.header.settings
    architecture = settings.get("general.architecture")
    layers = settings.get(f"{architecture}.block_count")
    if family is None or not isinstance(layers, int) or layers > len(file.names()):
        return {}
    gguf = require("gguf", "hf")
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        return {}
    table = gguf.get_tensor_name_map(kinds[architecture], layers)
    inner = [_RENAMED.get(family, {}).get(each, each) for each in _INNER]
    inner += _MIXTRAL if family == "mixtral" else _MIXTURE
    modules = [*_OUTER, *(f"model.layers.{layer}.{each}" for layer in range(layers) for each in inner)]
    found: dict[str, GGUFPlace] = {}
    for module in modules:
        for end in (".weight", ".bias"):
            stored = table.get_name(module.replace(".{}", "") + end, try_suffixes=(end,))
            if stored is not None and "{}" in module:
                found |= {module.format(place[0]) + end: place[1] for place in _split_experts(file, stored)}
            elif stored in file:
                found[module + end] = GGUFPlace(stored)
    known = {place.tensor for place in found.values()}
    return found if {*file.names()} - {*_COMPUTED} == known else {}


def _split_experts(file: GGUFFile, stored: str) -> Iterator[tuple[int, GGUFPlace]]:
    """Yield each expert of a projection: a slice of a stack, or a tensor of its own as in older files."""
    if stored in file:
        for expert in range(file.spec(stored).shape[0]):
            yield expert, GGUFPlace(stored, expert)
        return
    expert = 0
    while (alone := stored.replace("_exps.", f".{expert}.")) in file:
        yield expert, GGUFPlace(alone)
        expert += 1
