"""Make the config.json of a GGUF file from its settings."""

from __future__ import annotations

from typing import Any

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.gguf_names import GGUFModel
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
}
#: Architectures whose kind of model has another name, and whose class is not the kind's name with a capital.
_KINDS = {"gemma3": "gemma3_text"}
_CLASSES = {"llama": "Llama", "gemma3": "Gemma3"}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def gguf_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config of a GGUF file that has no config.json beside it; empty for anything else."""
    if not isinstance(checkpoint, GGUFModel) or read_config(checkpoint.directory):
        return {}
    settings = checkpoint.file.header.settings
    kind = str(settings["general.architecture"])
    found: dict[str, Any] = {
        "architectures": [f"{_CLASSES.get(kind, kind.capitalize())}ForCausalLM"],
        "model_type": _KINDS.get(kind, kind),
        "vocab_size": checkpoint.spec("model.embed_tokens.weight").shape[0],
        "tie_word_embeddings": "lm_head.weight" not in checkpoint,
        "torch_dtype": checkpoint.spec("model.embed_tokens.weight").element.name,
    }
    found |= {key: settings[own] for key, part in _SETTINGS.items() if (own := f"{kind}.{part}") in settings}
    found |= {
        key: settings[own] for key, part in _TOKENS.items() if (own := f"tokenizer.ggml.{part}_token_id") in settings
    }
    return found


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
