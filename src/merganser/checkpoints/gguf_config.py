"""The config of a model: its config.json, or one made from the settings of a GGUF file."""

from __future__ import annotations

from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.gguf_model import GGUFModel
from merganser.checkpoints.json_file import read_config

#: Keys of a config, and the settings they come from.
_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts_per_tok": "expert_used_count",
}
#: Families whose class is not the family's name in camel case.
_CLASSES = {"gemma3_text": "Gemma3"}
#: What llama.cpp assumes where a file does not say it, and what it assumes of a family.
_DEFAULTS = {"rope_theta": 10000.0}
_ASSUMED = {"qwen3_moe": {"norm_topk_prob": True}}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def gguf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of a GGUF file that has no config.json beside it; empty for anything else."""
    if not isinstance(checkpoint, GGUFModel) or read_config(checkpoint.directory):
        return {}
    settings = checkpoint.file.header.settings
    kind, family = str(settings["general.architecture"]), checkpoint.family
    name = _CLASSES.get(family) or "".join(part.capitalize() for part in family.split("_"))
    found: dict[str, Any] = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": family,
        "vocab_size": checkpoint.spec("model.embed_tokens.weight").shape[0],
        "tie_word_embeddings": "lm_head.weight" not in checkpoint,
        "torch_dtype": checkpoint.spec("model.embed_tokens.weight").element.name,
    }
    found |= _DEFAULTS | {
        key: settings[own] for key, part in _SETTINGS.items() if (own := f"{kind}.{part}") in settings
    }
    found |= _mixture(checkpoint) | _ASSUMED.get(family, {})
    found |= {
        key: settings[own] for key, part in _TOKENS.items() if (own := f"tokenizer.ggml.{part}_token_id") in settings
    }
    return found


def model_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config.json beside a checkpoint, or the config of a GGUF file without one; empty if there is none."""
    return read_config(checkpoint.directory) or gguf_config(checkpoint)


def _mixture(model: GGUFModel) -> dict[str, Any]:
    """Return the numbers and widths of experts, which not all files have among their settings."""
    experts = [name for name in model.names() if ".experts." in name]
    if not experts:
        return {}
    count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in experts)
    if model.family == "mixtral":
        return {"num_local_experts": count}
    width = {name.rpartition(".experts.")[0]: model.spec(name).shape[1] for name in experts if "down_proj" in name}
    if model.family == "olmoe":
        return {"num_experts": count, "intermediate_size": max(width.values())}
    layers = {int(name.split(".")[2]) for name in model.names() if name.startswith("model.layers.")}
    sparse = {int(name.split(".")[2]) for name in experts}
    found = {"num_experts": count, "moe_intermediate_size": max(width.values())}
    if shared := [name for name in model.names() if name.endswith(".shared_expert.down_proj.weight")]:
        found["shared_expert_intermediate_size"] = model.spec(shared[0]).shape[1]
    return found | {"mlp_only_layers": sorted(layers - sparse)}


def gguf_notes(checkpoint: Checkpoint) -> list[str]:
    """Return what a user should know of a GGUF file that gives the output its config."""
    if not isinstance(checkpoint, GGUFModel) or read_config(checkpoint.directory):
        return []
    settings, names = checkpoint.file.header.settings, checkpoint.file.names()
    kind = settings["general.architecture"]
    scaled = f"{kind}.rope.scaling.type" in settings or any(name.startswith("rope_") for name in names)
    more = "; its scaling of rotary positions is not in it" if scaled else ""
    return [
        f"{checkpoint.label} has no config.json beside it: the output gets one from the settings of the file{more}, "
        "and no tokenizer; put the model's config.json and tokenizer files beside it, or name a directory as the base"
    ]
