"""Tiny models of more than a hundred architectures, merged, slerped and stacked, as transformers loads and runs them.

The suite takes every sixth of them; `MERGANSER_ARCHITECTURES=all` takes all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import merganser as mg
from merganser.errors import InputError
from support.llamas import transformers  # noqa: F401
from support.tiny_models import tiny_inputs, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

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
#: Stacks that cannot be, and why.
REFUSED = {
    "JambaForCausalLM": "attn_layer_period: 3, expert_layer_period: 2",
    "AlbertForMaskedLM": "has no run of numbered layers",
    "EsmForMaskedLM": "'esm.contact_head.regression.weight' has a column for each head of each of the 3 layers",
    **dict.fromkeys(
        (
            f"{name}ForImageClassification"
            for name in ("ResNet", "RegNet", "ConvNext", "Swin", "Segformer", "PoolFormer")
        ),
        "stage",
    ),
}
ALL = os.environ.get("MERGANSER_ARCHITECTURES") == "all"
ORDER = (0, 1, 1, 2)


def load(model: Any, out: Path) -> Any:
    """Load an output as the class of a model, without a weight missing or left over, and run it."""
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    assert not wrong, wrong
    with torch.no_grad():
        outputs = loaded.eval()(**tiny_inputs(loaded))
    first = next(value for value in outputs.values() if isinstance(value, torch.Tensor))
    assert torch.isfinite(first).all()
    return loaded


def check_stack(original: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> None:
    """Compare the weights of a stack of layers 0, 1, 1, 2 with those of three layers, name by name."""
    added = [name for name in made if name not in original]
    (prefix,) = {found[1] for name in added if (found := re.match(r"(.*?\b)3\.", name))}
    for name, value in made.items():
        layer = re.match(r"(\d+)(\..*)", name.removeprefix(prefix)) if name.startswith(prefix) else None
        source = f"{prefix}{ORDER[int(layer[1])]}{layer[2]}" if layer else name
        assert torch.equal(value, original[source]), name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.mark.parametrize("name", list(ARCHITECTURES)[:: 1 if ALL else 6])
def test_merged_slerped_and_stacked(name: str, home: Path, transformers: Any) -> None:  # noqa: F811
    if (cls := getattr(transformers, name, None)) is None:
        pytest.skip(f"this version of transformers has no {name}")
    place = home / name
    first, second = (tiny_model(cls, ARCHITECTURES[name], seed) for seed in (0, 1))
    first.save_pretrained(place / "a")
    second.save_pretrained(place / "b")
    paths = [str(place / "a"), str(place / "b")]
    one, two = first.state_dict(), second.state_dict()
    for method, parameters in (("linear", {}), ("slerp", {"t": 0.4})):
        out = mg.run({"method": method, "models": paths, "parameters": parameters}, place / method)
        made = load(first, out).state_dict()
        assert list(made) == list(one)
        for key, value in made.items():
            if method == "linear" and value.is_floating_point():
                torch.testing.assert_close(value, (one[key] + two[key]) / 2, rtol=1e-5, atol=1e-6)
            elif value.is_floating_point() and not torch.equal(one[key], two[key]):
                assert not torch.equal(value, one[key]), key
    layers = ([0, 2], [1, 2]) if REFUSED.get(name) == "stage" else ([0, 2], [1, 3])
    stack = {"method": "passthrough", "slices": [{"path": paths[0], "layers": each} for each in layers]}
    if name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name]):
            mg.run(stack, place / "stack")
        return
    check_stack(one, load(first, mg.run(stack, place / "stack")).state_dict())
