"""The layouts of mixtures of experts: names of tensors and settings in the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merganser.errors import InputError, did_you_mean
from merganser.surgery.moe_recipes import PROMPTED, MoERecipe

_DEEPSEEK = "deepseek-ai/deepseek-moe-16b-base--"
#: Settings that configs of dense models omit and for which mixtures have another default.
_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048, "attention_bias": False}


@dataclass(frozen=True)
class MoELayout:
    """A kind of mixture: the dense models it can be made from, and its names and settings.

    Attributes:
        name: What recipes call it.
        dense: The `model_type` of the dense models.
        kind: The `model_type` of the mixture.
        architecture: Its class.
        mlp: The module of a layer that has gate and experts.
        parts: Names of an expert's three matrices: gate, up, down.
        shared: The fewest and the most shared experts.
        shared_module: What a shared expert is called.
        shared_gate: Whether shared experts have a gate.
        biases: Whether attention has biases, which are zero if the dense models have none.
        head_dim: Whether heads may have another width than the hidden size divided by their number.
    """

    name: str
    dense: tuple[str, ...]
    kind: str
    architecture: str
    mlp: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[int, int] = (0, 0)
    shared_module: str = ""
    shared_gate: bool = False
    biases: bool = False
    head_dim: bool = True

    def config(self, dense: Mapping[str, Any], recipe: MoERecipe) -> dict[str, Any]:
        """Return the settings of the mixture in addition to those of the dense base."""
        count, wide = len(recipe.experts), dense.get("intermediate_size")
        found: dict[str, Any] = {
            **{key: value for key, value in _DEFAULTS.items() if key not in dense},
            "num_key_value_heads": dense.get("num_key_value_heads") or dense.get("num_attention_heads"),
            "architectures": [self.architecture],
            "model_type": self.kind,
            "num_experts_per_tok": recipe.per_token or min(self._choose_per_token(recipe), count),
            "sliding_window": None,
            "tie_word_embeddings": bool(dense.get("tie_word_embeddings")),
            "auto_map": None,
        }
        if "rope_theta" not in dense and "rope_parameters" not in dense:
            found["rope_theta"] = 10000.0
        if self.kind == "mixtral":
            return found | {"num_local_experts": count}
        found |= {"moe_intermediate_size": wide, "norm_topk_prob": True}
        if self.kind == "deepseek":
            classes = {"AutoConfig": "configuration_deepseek.DeepseekConfig"}
            classes |= {f"Auto{name}": f"modeling_deepseek.Deepseek{cls}" for name, cls in _DEEPSEEK_CLASSES.items()}
            return found | {
                **_translate_rope(dense),
                "n_routed_experts": count,
                "n_shared_experts": len(recipe.shared) or None,
                "first_k_dense_replace": 0,
                "moe_layer_freq": 1,
                "scoring_func": "softmax",
                "auto_map": {name: _DEEPSEEK + place for name, place in classes.items()},
            }
        found |= {"num_experts": count, "decoder_sparse_step": 1, "mlp_only_layers": []}
        found |= {"shared_expert_intermediate_size": wide} if self.kind == "qwen2_moe" else {}
        return found | {"use_sliding_window": False, "max_window_layers": dense.get("num_hidden_layers")}

    def notes(self) -> list[str]:
        """Return what a user of the mixture must know of the programs that load it."""
        return [_DEEPSEEK_NOTE] if self.kind == "deepseek" else []

    def _choose_per_token(self, recipe: MoERecipe) -> int:
        """Return how many experts a token uses where the recipe does not say, as mergekit-moe does."""
        return 1 if self.kind == "deepseek" and recipe.shared else 2


def _translate_rope(dense: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary embeddings by the names of transformers 4, where DeepSeek's own code runs."""
    given = dense.get("rope_parameters") or dense.get("rope_scaling") or {}
    scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "type")}
    kind = scaling.get("rope_type") or given.get("type") or "default"
    found = {"rope_theta": given["rope_theta"]} if "rope_theta" in given else {}
    return found | ({"rope_scaling": {**scaling, "type": kind}} if kind != "default" else {})


_DEEPSEEK_CLASSES = {"Model": "Model", "ModelForCausalLM": "ForCausalLM"}
_DEEPSEEK_NOTE = (
    "transformers loads this layout with trust_remote_code=True and version 4: config.json names DeepSeek's own code "
    "on the hub, which transformers 5 cannot import; vLLM has this architecture, llama.cpp weighs its experts "
    "differently"
)
LAYOUTS = (
    MoELayout("mixtral", ("llama", "mistral"), "mixtral", "MixtralForCausalLM", "block_sparse_moe", ("w1", "w3", "w2")),
    MoELayout("qwen3", ("qwen3",), "qwen3_moe", "Qwen3MoeForCausalLM"),
    MoELayout(
        "qwen2",
        ("llama", "mistral", "qwen2"),
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        shared=(1, 1),
        shared_module="shared_expert",
        shared_gate=True,
        biases=True,
    ),
    MoELayout(
        "deepseek",
        ("llama", "mistral"),
        "deepseek",
        "DeepseekForCausalLM",
        shared=(0, 1),
        shared_module="shared_experts",
        head_dim=False,
    ),
)


def choose_layout(recipe: MoERecipe, configs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> MoELayout:
    """Return the layout that a recipe names, or the first that its models allow.

    Args:
        recipe: The recipe.
        configs: The configs of the base and of every expert.
        labels: What they are called.

    Raises:
        InputError: If none fits, with the reason for each.
    """
    kinds = [str(config.get("model_type", "")) for config in configs]
    if unlike := next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None):
        raise InputError(
            f"{labels[unlike]} is a {kinds[unlike] or 'model without a config'}, {labels[0]} a {kinds[0]}: experts "
            "must have the architecture of the base"
        )
    named = {"qwen": "qwen2", "qwen moe": "qwen2", "qwen3 moe": "qwen3", "deepseek moe": "deepseek"}
    asked = (recipe.architecture or "").lower()
    asked = named.get(asked, asked)
    known = [layout.name for layout in LAYOUTS]
    if asked and asked not in known:
        raise InputError(f"architecture: unknown {recipe.architecture!r}{did_you_mean(asked, known)}")
    why = []
    for layout in LAYOUTS:
        if asked in ("", layout.name):
            if (reason := _explain_refusal(layout, recipe, configs[0])) is None:
                return layout
            why.append(f"{layout.name} {reason}")
    raise InputError(f"no mixture can be made of these models: {'; '.join(why)}")


def _explain_refusal(layout: MoELayout, recipe: MoERecipe, dense: Mapping[str, Any]) -> str | None:
    low, high = layout.shared
    kind = str(dense.get("model_type", ""))
    if kind not in layout.dense:
        return f"has a place for the experts of {' or '.join(layout.dense)} models, not of {kind or 'unknown'} ones"
    if not low <= len(recipe.shared) <= high:
        allowed = f"{low} to {high} shared experts" if low < high else f"{low} shared expert{'s' if low != 1 else ''}"
        return f"takes {allowed}, not {len(recipe.shared)}"
    if layout.shared_gate and recipe.gate_mode in PROMPTED and not all(each.positive for each in recipe.shared):
        return "needs positive_prompts for its shared expert"
    if not layout.shared_gate and any(each.positive or each.negative for each in recipe.shared):
        return "has no gate for its shared expert; leave its prompts out"
    width, heads, hidden = (dense.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
    if not layout.head_dim and width and heads and hidden and width * heads != hidden:
        return f"has no setting for the width of heads, which is {width} here, not {hidden} / {heads}"
    return None
