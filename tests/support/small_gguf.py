"""A small Llama, and GGUF files of it as llama.cpp's converter writes them."""

from __future__ import annotations

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


def llama() -> dict[str, np.ndarray]:
    """The weights of a small model under the names of transformers."""
    random = np.random.default_rng(0)
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


def write(
    path: Path, weights: dict[str, np.ndarray], architecture: str = "llama", kind=None, heads: int = HEADS
) -> Path:
    """A file as llama.cpp's converter writes it: its names, and pairs of rotary dimensions beside each other."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_context_length(128)
    writer.add_head_count(heads)
    writer.add_head_count_kv(SHARED)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(0)
    table = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[architecture], LAYERS)
    for name, values in weights.items():
        stored = table.get_name(name, try_suffixes=(".weight",))
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
