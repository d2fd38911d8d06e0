"""The list of architectures of transformers that tests sweep over; `tiny_models` makes one of each.

The suite takes a part of them; `MERGANSER_ARCHITECTURES=all` takes all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

SPEECH = {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}
MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}}


def none(names: str, end: str = "") -> dict[str, dict[str, Any]]:
    """Architectures that need nothing else."""
    return {f"{name}{end}": {} for name in names.split()}


#: A class of transformers -> what its config needs besides small sizes.
DECODERS: dict[str, dict[str, Any]] = {
    **none(
        "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Phi Phi3 OPT Bloom Falcon Mpt StableLm Cohere Cohere2 "
        "Olmo Olmo2 Olmo3 Starcoder2 Granite Glm Glm4 SmolLM3 Ernie4_5 Nemotron BioGpt XGLM GPTBigCode "
        "Persimmon Helium Exaone4 SeedOss GPTNeoX Mamba FalconMamba Rwkv RecurrentGemma ModernBertDecoder"
    ),
    "GPTNeo": {"attention_types": [[["global", "local", "global"], 1]]},
    "GPTJ": {"rotary_dim": 4},
    "CodeGen": {"rotary_dim": 4, "n_head": 4},
    "Mamba2": {"num_heads": 4, "n_groups": 1},
    **none(
        "Mixtral Qwen2Moe Qwen3Moe Olmoe DeepseekV2 DeepseekV3 GraniteMoe Phimoe GptOss Llama4 Ernie4_5_Moe "
        "Glm4Moe Lfm2 MiniMax FlexOlmo"
    ),
    "Jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2},
    "Bamba": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    **{f"{name}ForCausalLM": settings for name, settings in DECODERS.items()},
    **none(
        "BertForMaskedLM RobertaForMaskedLM XLMRobertaForMaskedLM DistilBertForMaskedLM AlbertForMaskedLM "
        "ElectraForMaskedLM DebertaV2ForMaskedLM ModernBertForMaskedLM LongformerForMaskedLM FNetForMaskedLM "
        "ConvBertForMaskedLM RoFormerForMaskedLM EsmForMaskedLM CamembertForMaskedLM"
    ),
    "MPNetForMaskedLM": {"relative_attention_num_buckets": 32},
    **none("BertForSequenceClassification XLNetLMHeadModel NomicBertModel"),
    **none(
        "T5 MT5 UMT5 Bart MBart Pegasus M2M100 Blenderbot SwitchTransformers ProphetNet LongT5",
        "ForConditionalGeneration",
    ),
    "LEDForConditionalGeneration": {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32},
    "MarianMTModel": {},
    **{f"{name}ForImageClassification": {} for name in ("ViT", "DeiT", "Beit", "Dinov2")},
    **none("ViTMAEModel IJepaModel"),
    "ResNetForImageClassification": {**STAGES, "embedding_size": 8, "layer_type": "basic"},
    "RegNetForImageClassification": {**STAGES, "embedding_size": 8, "groups_width": 4},
    "ConvNextForImageClassification": {**STAGES, "image_size": 32, "patch_size": 4},
    "SwinForImageClassification": {"depths": [1, 3], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    "SegformerForImageClassification": {
        "num_encoder_blocks": 2,
        "depths": [1, 3],
        "hidden_sizes": [8, 16],
        "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8,
    },
    "PoolFormerForImageClassification": {
        "depths": [1, 3],
        "hidden_sizes": [8, 16],
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    **{f"{name}ForCTC": SPEECH for name in ("Wav2Vec2", "Hubert", "WavLM", "Wav2Vec2Conformer")},
    "Data2VecAudioForCTC": {**SPEECH, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    "SEWForCTC": {**SPEECH, "squeeze_factor": 1},
    "WhisperForConditionalGeneration": {},
    "Speech2TextForConditionalGeneration": {
        "conv_channels": 8,
        "input_feat_per_channel": 8,
        "max_source_positions": 64,
    },
    "ASTForAudioClassification": {"max_length": 32, "num_mel_bins": 16},
    **none("CLIPModel SiglipModel AltCLIPModel ChineseCLIPModel"),
    **{f"{name}ForConditionalGeneration": {} for name in ("Blip", "Llava", "PaliGemma", "Gemma3", "Idefics3")},
    **{f"{name}ForConditionalGeneration": MROPE for name in ("Qwen2VL", "Qwen2_5_VL")},
    "GitForCausalLM": {},
}


def part_of(names: Iterable[str], share: int) -> list[str]:
    """Return one of every `share` names, or all of them if the environment asks for that."""
    return list(names)[:: 1 if os.environ.get("MERGANSER_ARCHITECTURES") == "all" else share]
