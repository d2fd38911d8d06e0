"""The shapes of language models, without weights."""

from __future__ import annotations

from collections.abc import Mapping

#: Layers, width, width of the perceptron, width of keys and values, vocabulary.
SIZES: Mapping[str, tuple[int, int, int, int, int]] = {
    "1B": (16, 2048, 8192, 512, 128256),
    "8B": (32, 4096, 14336, 1024, 128256),
    "70B": (80, 8192, 28672, 1024, 128256),
    "405B": (126, 16384, 53248, 1024, 128256),
}


def llama_shapes(
    layers: int, width: int, inner: int, narrow: int, vocabulary: int, experts: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Llama, or of a mixture of experts with the same attention.

    Args:
        layers: The number of blocks.
        width: The width of the residual stream.
        inner: The width of a perceptron.
        narrow: The width of keys and values.
        vocabulary: The number of tokens.
        experts: The number of perceptrons in a block that a router chooses from; 0 for one without a router.

    Returns:
        The shape of every tensor by its name in transformers.

    Example:
        >>> llama_shapes(*SIZES["8B"])["model.layers.31.mlp.down_proj.weight"]
        (4096, 14336)
    """
    perceptron = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (narrow, width),
        "self_attn.v_proj.weight": (narrow, width),
        "self_attn.o_proj.weight": (width, width),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if experts:
        layer["mlp.gate.weight"] = (experts, width)
    for place in [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]:
        layer |= {f"{place}.{name}.weight": shape for name, shape in perceptron.items()}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for number in range(layers):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
