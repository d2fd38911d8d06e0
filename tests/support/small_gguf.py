"""A small Llama and small mixtures, and GGUF files of them as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

HIDDEN, HEADS, SHARED, LAYERS = 64, 4, 2, 2
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "vocab_size": 32,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def llama(seed: int = 0) -> dict[str, np.ndarray]:
    """The weights of a small model under the names of transformers."""
    random = np.random.default_rng(seed)
    width = HIDDEN // HEADS * SHARED
    shapes = {"model.embed_tokens.weight": (32, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (32, HIDDEN)}
    for layer in range(LAYERS):
        inner = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (width, HIDDEN),
            "self_attn.v_proj": (width, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "mlp.down_proj": (HIDDEN, 96),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


EXPERTS, WIDTH = 4, 32


def mixture(architecture: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The weights of a small mixture of experts as the hub has them: "mixtral", "qwen2moe", "qwen3moe" or "olmoe"."""
    random = np.random.default_rng(seed)
    weights = {name: values for name, values in llama(seed).items() if ".mlp." not in name}
    width = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        if architecture == "mixtral":
            shapes[f"{layer}.block_sparse_moe.gate.weight"] = (EXPERTS, HIDDEN)
            experts, parts = f"{layer}.block_sparse_moe.experts", ("w1", "w3", "w2")
        else:
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            experts, parts = f"{layer}.mlp.experts", ("gate_proj", "up_proj", "down_proj")
        sizes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        shapes |= {f"{experts}.{e}.{part}.weight": size for e in range(EXPERTS)
                   for part, size in zip(parts, sizes, strict=True)}  # fmt: skip
        if architecture == "qwen2moe":
            shapes |= {
                f"{layer}.mlp.shared_expert.{part}.weight": size for part, size in zip(parts, sizes, strict=True)
            }
            shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, HIDDEN)
            shapes |= {f"{layer}.self_attn.{p}_proj.bias": (w,) for p, w in zip("qkv", (HIDDEN, 32, 32), strict=True)}
        if architecture in ("qwen3moe", "olmoe"):
            sizes = [(width,)] * 2 if architecture == "qwen3moe" else [(HIDDEN,), (SHARED * width,)]
            shapes |= {f"{layer}.self_attn.{p}_norm.weight": size for p, size in zip("qk", sizes, strict=True)}
    return weights | {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def stacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights with those of all experts of a layer in one tensor, and gates of shared experts as vectors."""
    found: dict[str, list[np.ndarray]] = {}
    for name, values in weights.items():
        found.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(values)
    return {name: (np.stack(parts) if len(parts) > 1 else parts[0].squeeze(0) if "shared_expert_gate" in name
                   else parts[0]) for name, parts in found.items()}  # fmt: skip


def write(
    path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", kind=None, heads: int = HEADS
) -> Path:
    """A file as llama.cpp's converter writes it: its names, and pairs of rotary dimensions beside each other."""
    import gguf

    if any("experts" in name for name in weights):
        weights = stacked(weights)
    architecture, mixtral = ("llama", True) if architecture == "mixtral" else (architecture, False)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH if mixtral or architecture == "olmoe" else 96)
    writer.add_context_length(128)
    writer.add_head_count(heads)
    writer.add_head_count_kv(SHARED)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    if mixtral or "moe" in architecture:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(WIDTH)
        writer.add_expert_shared_feed_forward_length(WIDTH)
        writer.add_key_length(HIDDEN // HEADS)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(0)
    table = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], LAYERS)
    for name, values in weights.items():
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        for part, count in (("q_proj", HEADS), ("k_proj", SHARED)):
            if part in name and architecture == "llama":
                size = len(values) // count
                values = np.concatenate(
                    [values[h * size : (h + 1) * size].reshape(2, size // 2, -1).swapaxes(0, 1).reshape(size, -1)
                     for h in range(count)]
                )  # fmt: skip
        if kind is not None and values.ndim > 1:
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(stored, packed, raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
