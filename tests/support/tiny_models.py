"""Tiny models of many architectures with random weights, made from the config classes of the installed transformers."""

from __future__ import annotations

from typing import Any

import torch

#: Sizes that a config gets where it has a setting of that name, in every section of it.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "decoder_vocab_size", "codebook_size"), 40),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size", "emb_dim"), 16),
    **dict.fromkeys(("word_embed_proj_dim", "backbone_embed_dim", "attention_hidden_size", "rnn_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 24),
    **dict.fromkeys(("ffn_hidden_size", "n_inner", "hidden_dim", "mlp_dim", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("depth", "num_decoder_layers", "num_encoder_layers", "text_encoder_num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "n_group", "topk_group", "n_groups"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_shared_experts", "moe_topk", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 8),
    **dict.fromkeys(
        ("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_head_dim"), 8
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(
        ("state_size", "mamba_d_state", "ssm_state_size", "conv_kernel", "mamba_d_conv", "conv_L_cache"), 4
    ),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"), 1),
    "forced_eos_token_id": None,
    "image_size": 16,
    "patch_size": 8,
    "num_mel_bins": 8,
    "relative_attention_num_buckets": 8,
    "attention_window": 4,
    "sliding_window": 8,
    "projection_dim": 8,
    "rescale_every": 0,
    "use_mamba_kernels": False,
    "num_labels": 3,
}
_LENGTH = 8


def tiny_config(cls: Any, settings: dict[str, Any]) -> Any:
    """Return a small config of a model class: common sizes made small, then what the architecture needs besides."""
    config_class = cls.config_class
    return config_class(**_shrunk(config_class(), settings))


def _shrunk(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    given = config.to_dict()
    aliases = {alias: name for alias, name in config.attribute_map.items() if name not in {**_SIZES, **settings}}
    known = {**given, **{alias: given.get(name) for alias, name in aliases.items()}}
    known = {key: value for key, value in known.items() if key in aliases or key not in config.attribute_map}
    own = {key: size for key, size in _SIZES.items() if key in known and not isinstance(known[key], (list, tuple))}
    for section in config.sub_configs:
        inner = getattr(config, section, None)
        if inner is not None:
            kind = {"model_type": inner.model_type} if inner.model_type else {}
            own[section] = kind | _shrunk(inner, settings.get(section, {}))
    return own | {key: value for key, value in settings.items() if key not in config.sub_configs}


def tiny_model(cls: Any, settings: dict[str, Any], seed: int) -> Any:
    """Return a model with random weights, different for each seed in every parameter."""
    torch.manual_seed(seed)
    model = cls(tiny_config(cls, settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # others, such as sinusoids, are not saved
                parameter.add_(torch.randn_like(parameter) * 0.02)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
    return model


def tiny_inputs(model: Any) -> dict[str, Any]:
    """Return one small batch for a model, by the kind of its main input."""
    config = model.config
    vision = getattr(config, "vision_config", config)
    ids = torch.arange(2, 2 + _LENGTH)[None]
    image = torch.rand(1, getattr(vision, "num_channels", 3), *[getattr(vision, "image_size", None) or 32] * 2)
    main = model.main_input_name
    if main == "input_ids":
        found: dict[str, Any] = {"input_ids": ids}
        if hasattr(config, "vision_config") and "Model" in type(model).__name__ and hasattr(model, "vision_model"):
            found["pixel_values"] = image
    elif main == "pixel_values":
        found = {"pixel_values": image}
        if hasattr(config, "text_config"):
            found["input_ids"] = ids
    elif hasattr(config, "input_feat_per_channel"):
        found = {main: torch.rand(1, 64, config.input_feat_per_channel)}
    elif main == "input_features":
        found = {main: torch.rand(1, config.num_mel_bins, 64)}
    elif hasattr(config, "frequency_stride"):
        found = {main: torch.rand(1, config.max_length, config.num_mel_bins)}
    else:
        found = {main: torch.rand(1, 2000)}
    if config.is_encoder_decoder:
        found |= {"decoder_input_ids": ids, "use_cache": False}
    return found
