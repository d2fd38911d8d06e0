"""Every kind of adapter on every kind of architecture: what is written gives the logits of PEFT's own merge."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import merganser as mg
from merganser.checkpoints.adapter_proof import prove
from support.llamas import transformers  # noqa: F401

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = SMALL | {"vocab_size": 32, "max_position_embeddings": 16}
IMAGES = SMALL | {"image_size": 8, "patch_size": 4}
MOE = TEXT | {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
#: Class, settings, linear layers, an embedding, a head, a feed-forward layer.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], list[str], str, str, str]] = {
    "llama": ("LlamaForCausalLM", TEXT | {"num_key_value_heads": 2}, ["q_proj", "down_proj"], "embed_tokens",
              "lm_head", "down_proj"),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
             ["c_attn", "attn.c_proj", "mlp.c_proj"], "wpe", "ln_f", "mlp.c_proj"),
    "bert": ("BertForSequenceClassification", TEXT | {"num_labels": 3}, ["query", "output.dense"], "word_embeddings",
             "classifier", "output.dense"),
    "t5": ("T5ForConditionalGeneration",
           {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
            "relative_attention_num_buckets": 8}, ["q", "wo"], "relative_attention_bias", "final_layer_norm", "wo"),
    "opt": ("OPTForCausalLM",
            {"vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
             "max_position_embeddings": 16, "word_embed_proj_dim": 16}, ["q_proj", "fc2"], "embed_positions",
            "final_layer_norm", "fc2"),
    "mixtral": ("MixtralForCausalLM", MOE, ["q_proj", "o_proj"], "embed_tokens", "lm_head", "o_proj"),
    "qwen2_moe": ("Qwen2MoeForCausalLM",
                  MOE | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
                  ["q_proj", "shared_expert.down_proj"], "embed_tokens", "lm_head", "shared_expert.down_proj"),
    "vit": ("ViTForImageClassification", IMAGES, ["q_proj", "fc2", "projection"], "", "classifier", "fc2"),
    "clip": ("CLIPVisionModelWithProjection", IMAGES | {"projection_dim": 8}, ["q_proj", "fc2", "patch_embedding"],
             "position_embedding", "visual_projection", "fc2"),
    "resnet": ("ResNetForImageClassification",
               {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3, "layer_type": "basic"},
               ["convolution"], "", "classifier.1", "convolution"),
}  # fmt: skip

PLAIN = {"r": 2, "init_lora_weights": False}
KINDS: dict[str, Any] = {
    "lora": lambda a: peft.LoraConfig(**PLAIN, target_modules=a[2]),
    "patterns": lambda a: peft.LoraConfig(
        **PLAIN, target_modules=a[2], use_rslora=True, rank_pattern={a[2][0]: 4}, alpha_pattern={a[2][-1]: 5}
    ),
    "all-linear": lambda a: peft.LoraConfig(**PLAIN, target_modules="all-linear"),
    "dora": lambda a: peft.LoraConfig(**PLAIN, target_modules=a[2], use_dora=True),
    "biases": lambda a: peft.LoraConfig(**PLAIN, target_modules=a[2], bias="all"),
    "lora bias": lambda a: peft.LoraConfig(**PLAIN, target_modules=a[2], lora_bias=True),
    "embedding": lambda a: peft.LoraConfig(**PLAIN, target_modules=[*a[2], a[3]]),
    "embedding, dora": lambda a: peft.LoraConfig(**PLAIN, target_modules=[*a[2], a[3]], use_dora=True),
    "saved": lambda a: peft.LoraConfig(**PLAIN, target_modules=a[2], modules_to_save=[a[4]]),
    "tokens": lambda a: peft.LoraConfig(**PLAIN, target_modules=a[2], trainable_token_indices=[1, 5]),
    "experts": lambda a: peft.LoraConfig(
        **PLAIN, target_modules=a[2], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    ),
    "loha": lambda a: peft.LoHaConfig(r=2, target_modules=a[2], init_weights=False),
    "lokr": lambda a: peft.LoKrConfig(r=2, target_modules=a[2], init_weights=False),
    "lokr, both factored": lambda a: peft.LoKrConfig(
        r=1, target_modules=a[2], init_weights=False, decompose_both=True, decompose_factor=4
    ),
    "effective conv": lambda a: peft.LoHaConfig(
        r=2, target_modules=a[2], init_weights=False, use_effective_conv2d=True
    ),
    "effective conv, lokr": lambda a: peft.LoKrConfig(
        r=1, target_modules=a[2], init_weights=False, use_effective_conv2d=True, decompose_factor=2
    ),
    "ia3": lambda a: peft.IA3Config(target_modules=a[2], feedforward_modules=[a[5]], init_ia3_weights=False),
    "oft": lambda a: peft.OFTConfig(oft_block_size=4, target_modules=a[2], init_weights=False),
    "boft": lambda a: peft.BOFTConfig(boft_block_size=2, target_modules=a[2], init_weights=False),
    "vera": lambda a: peft.VeraConfig(r=4, d_initial=2.0, target_modules=a[2][:1]),
    "vera, own projections": lambda a: peft.VeraConfig(
        r=4, d_initial=2.0, target_modules=a[2][:1], save_projection=False
    ),
    "hra": lambda a: peft.HRAConfig(r=4, target_modules=a[2], init_weights=False),
    "fourier": lambda a: peft.FourierFTConfig(n_frequency=10, target_modules=a[2][:1]),
    "adalora": lambda a: peft.AdaLoraConfig(init_r=3, target_modules=a[2], total_step=10),
    "norms": lambda a: peft.LNTuningConfig(target_modules=[a[4]]),
}
LORAS = ["lora", "patterns", "all-linear", "dora", "biases", "lora bias", "embedding", "embedding, dora", "saved"]
OTHERS = ["loha", "lokr", "lokr, both factored", "ia3", "oft", "boft", "vera"]
MATRIX = [
    *[("llama", kind) for kind in KINDS if kind not in ("experts", "lora bias")],
    *[("gpt2", kind) for kind in ("patterns", "dora", "biases", "embedding", "tokens", "ia3", "vera", "norms")],
    *[("bert", kind) for kind in ("all-linear", "lora bias", "biases", "embedding, dora", "saved", "ia3", "oft")],
    *[("t5", kind) for kind in ("patterns", "all-linear", "embedding", "tokens", "ia3", "loha")],
    *[("opt", kind) for kind in ("dora", "biases", "embedding", "ia3")],
    *[("mixtral", kind) for kind in ("lora", "saved", "experts", "oft")],
    *[("qwen2_moe", kind) for kind in ("all-linear", "experts", "boft")],
    *[("vit", kind) for kind in ("dora", "lokr", "ia3", "vera")],
    *[("clip", kind) for kind in ("lora", "biases", "embedding", "oft")],
    *[("resnet", kind) for kind in ("lora", "dora", "saved", "effective conv", "effective conv, lokr", "ia3", "oft")],
]  # fmt: skip
#: Kinds that are applied without PEFT.
OWN = {*LORAS, *OTHERS, "tokens", "effective conv", "effective conv, lokr"} - {"lora bias", "oft", "boft", "vera"}
#: What cannot be merged, and the reason given.
REFUSED: dict[tuple[str, str], str] = {}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: Any, transformers: Any) -> dict[str, Path]:  # noqa: F811
    """A tiny model of each architecture on disk."""
    found = {}
    for name, (kind, settings, *_) in ARCHITECTURES.items():
        torch.manual_seed(0)
        cls = getattr(transformers, kind)
        found[name] = tmp_path_factory.mktemp(name)
        model = cls(cls.config_class(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(found[name])
    return found


def outputs(model: Any, name: str) -> torch.Tensor:
    torch.manual_seed(1)
    ids = torch.arange(1, 13).reshape(2, 6)
    given: dict[str, Any] = {"input_ids": ids}
    if name in ("vit", "clip"):
        given = {"pixel_values": torch.randn(2, 3, 8, 8)}
    if name == "resnet":
        given = {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "t5":
        given["decoder_input_ids"] = ids.flip(1)
    with torch.no_grad():
        return model.eval()(**given)[0].float()


def train(base: Path, name: str, config: Any, out: Path, transformers: Any) -> Any:  # noqa: F811
    """Write an adapter with random weights; the model that PEFT makes of it."""
    model = getattr(transformers, ARCHITECTURES[name][0]).from_pretrained(base)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained(out)
    return adapted


@pytest.mark.parametrize(("name", "kind"), MATRIX)
def test_what_is_written_gives_the_logits_of_peft(
    name: str,
    kind: str,
    bases: dict[str, Path],
    tmp_path: Path,
    transformers: Any,  # noqa: F811
) -> None:
    config = copy.deepcopy(KINDS[kind](ARCHITECTURES[name]))
    model = train(bases[name], name, config, tmp_path / "adapter", transformers)
    before = outputs(getattr(transformers, ARCHITECTURES[name][0]).from_pretrained(bases[name]), name)
    reference = f"{bases[name]}+{tmp_path / 'adapter'}"
    if (name, kind) in REFUSED:
        with pytest.raises(mg.errors.InputError, match=REFUSED[name, kind]):
            mg.open(reference)
        return
    expected = outputs(model.merge_and_unload(), name)
    assert not torch.allclose(before, expected, atol=1e-3)
    out = mg.save(reference, tmp_path / "out")
    found = outputs(getattr(transformers, ARCHITECTURES[name][0]).from_pretrained(out), name)
    torch.testing.assert_close(found, expected, atol=2e-5 * max(1, expected.abs().max()), rtol=1e-4)
    proofs = prove(mg.open(reference))
    assert all(proof.residual < 1e-5 for proof in proofs)
    conv = kind == "ia3" and name in ("vit", "clip", "resnet")
    assert all(proof.own is (kind in OWN and not conv) for proof in proofs)
