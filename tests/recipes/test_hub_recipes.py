"""Recipes in the shapes that people publish in model cards (`hub/*.yml`), run on tiny checkpoints.

The first line of each says what must happen: `naive`, the result is that of the plain interpreter below; `runs`, the
method draws at random, needs a tokenizer or has its own tests, and the result loads; `refused`, with the reason.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import merganser as mg
from merganser import recipes
from merganser.errors import MerganserError
from recipes.test_vocabularies import tokenizer_json

RECIPES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "hub").glob("*.yml"))}
LAYERS, HIDDEN, WORDS = 8, 8, ["<unk>", *(f"w{i}" for i in range(15))]
Tensors = dict[str, torch.Tensor]


def weights(seed: int, hidden: int = HIDDEN, rows: int = len(WORDS)) -> Tensors:
    """A fine-tune of one base: the same numbers with a small change of their own."""
    shapes = {"model.embed_tokens.weight": (rows, hidden)}
    for layer in range(LAYERS):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                     "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):  # fmt: skip
            shapes[f"model.layers.{layer}.{part}.weight"] = (hidden,) if "norm" in part else (hidden, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (rows, hidden)}
    base, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=base) + (0.1 * torch.randn(shape, generator=own) if seed else 0)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    models = {"north/base-7b": 0, "north/chat-7b": 1, "south/math-7b": 2, "west/code-7b": 3}
    made = {name: (weights(seed), HIDDEN, []) for name, seed in models.items()}
    made["south/talk-7b"] = (weights(4, rows=len(WORDS) + 2), HIDDEN, ["<|im_start|>", "<|im_end|>"])
    made["west/wide-9b"] = (weights(5, hidden=16), 16, [])
    for name, (tensors, hidden, added) in made.items():
        (root / name).mkdir(parents=True)
        save_file(tensors, root / name / "model.safetensors", {"format": "pt"})
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS,
                  "hidden_size": hidden, "intermediate_size": hidden, "num_attention_heads": 2,
                  "vocab_size": len(WORDS) + len(added), "torch_dtype": "float32"}  # fmt: skip
        (root / name / "config.json").write_text(json.dumps(config))
        (root / name / "tokenizer.json").write_text(json.dumps(tokenizer_json(WORDS, added)))
        (root / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    lora = root / "east" / "style-lora"
    lora.mkdir(parents=True)
    module = "base_model.model.model.layers.1.self_attn.q_proj"
    save_file(
        {f"{module}.lora_A.weight": torch.ones(2, HIDDEN), f"{module}.lora_B.weight": torch.ones(HIDDEN, 2)},
        lora / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (lora / "adapter_config.json").write_text(json.dumps(settings))
    return root


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name, hub, tmp_path):
    text = RECIPES[name]
    what, _, reason = text.splitlines()[0].removeprefix("# ").partition(": ")
    path = hub / f"{name}.yml"
    path.write_text(text)
    if what == "refused":
        with pytest.raises(MerganserError, match=reason):
            recipes.plan(recipes.load(path))
        return
    plan = recipes.plan(recipes.load(path))
    for note in re.findall("^# note: (.*)", text, re.MULTILINE):
        assert any(note in each for each in plan.notes), plan.notes
    made = load_file(mg.run(path, tmp_path / "out") / "model.safetensors")
    *_, document = yaml.safe_load_all(text)
    dtype = getattr(torch, document.get("out_dtype") or document["dtype"])
    assert {value.dtype for value in made.values()} == {dtype}
    if what == "runs":
        assert all(value.isfinite().all() for value in made.values())
        assert any(not torch.equal(value, load_file(hub / "north/base-7b" / "model.safetensors").get(key, value))
                   for key, value in made.items() if value.shape[0] == HIDDEN)  # fmt: skip
        return
    expected = interpret(document, lambda model: load_file(hub / model / "model.safetensors"))
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[document.get("out_dtype") or document["dtype"]]
        torch.testing.assert_close(made[key].float(), value, rtol=tolerance, atol=tolerance, msg=f"{name}: {key}")


def test_the_corpus_is_large_enough():
    assert len(RECIPES) >= 56
    assert sum(text.startswith("# naive") for text in RECIPES.values()) >= 30


def interpret(document: dict[str, Any], load) -> Tensors:
    """What a recipe of mergekit's dialect means, layer by layer and tensor by tensor."""
    slices = document.get("slices") or [
        {"sources": [{**model, "layer_range": [0, LAYERS]} for model in document["models"]]}
    ]
    ends = {"model.embed_tokens.weight": slices[0], "model.norm.weight": slices[-1], "lm_head.weight": slices[-1]}
    made = {name: merge(document, part, name, None, load) for name, part in ends.items()}
    number = 0
    for part in slices:
        first, last = (int(float(end)) for end in part["sources"][0]["layer_range"])
        for depth in range(last - first):
            for name in weights(0):
                if name.startswith("model.layers.0."):
                    inner = name.removeprefix("model.layers.0.")
                    key = f"model.layers.{number}.{inner}"
                    made[key] = merge(document, part, inner, (depth, last - first), load)
            number += 1
    return made


def merge(document, part, name: str, place: tuple[int, int] | None, load) -> torch.Tensor:
    share = place[0] / max(1, place[1] - 1) if place else 0.0
    method, base_name = document["merge_method"], document.get("base_model")
    values, settings, base = [], [], None
    for source in part["sources"]:
        first = int(float(source["layer_range"][0]))
        full = f"model.layers.{first + place[0]}.{name}" if place else name
        tensor = load(source["model"])[full].double()
        levels = [level.get("parameters") or {} for level in (source, part, document)]
        if source["model"] == base_name:
            base = tensor
            if method != "slerp":
                continue
        values.append(tensor)
        settings.append(lambda key, default, levels=levels, full=full: look_up(key, default, levels, full, share))
    if base is None and base_name:
        base = load(base_name)[full].double()
    top = [document.get("parameters") or {}]
    made = FORMULAS[method](values, base, settings, lambda key, default: look_up(key, default, top, full, share))
    return made.float()


def look_up(key: str, default: Any, levels: list[dict], name: str, share: float) -> Any:
    for level in levels:
        if key not in level:
            continue
        value = level[key]
        if isinstance(value, list) and isinstance(value[0], dict):
            value = next((case["value"] for case in value if case.get("filter", "*") in ("*", *_within(name))), None)
        if isinstance(value, list):
            at = share * (len(value) - 1)
            low = min(int(at), len(value) - 2)
            value = value[low] * (low + 1 - at) + value[low + 1] * (at - low)
        if value is not None:
            return value if isinstance(value, bool) else float(value)
    return default


def _within(name: str) -> set[str]:
    """All texts inside a name."""
    return {name[i:j] for i in range(len(name)) for j in range(i + 1, len(name) + 1)}


def linear(values, base, settings, top):
    found = [each("weight", 1.0) for each in settings]
    total = sum(w * v for w, v in zip(found, values, strict=True))
    return total / sum(found) if top("normalize", True) else total


def arc(a, b, t, limit=0.9995):
    cosine = float((a * b).sum() / (a.norm() * b.norm()))
    if abs(cosine) > limit:
        return (1 - t) * a + t * b
    angle = math.acos(cosine)
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def slerp(values, base, settings, top):
    other = next(v for v in values if v is not base)
    return arc(base, other, settings[0]("t", None))


def nuslerp(values, base, settings, top):
    one, two = (each("weight", 1.0) for each in settings)
    a, b = (v - (0 if base is None else base) for v in values)
    return arc(a, b, two / (one + two), 1.0) + (0 if base is None else base)


def multislerp(values, base, settings, top):
    found = torch.tensor([each("weight", 1.0) for each in settings], dtype=torch.float64)
    found = found / found.sum()
    deltas = [v - base for v in values]
    middle = sum(w * d / d.norm() for w, d in zip(found, deltas, strict=True))
    return base + sum(w * d.norm() for w, d in zip(found, deltas, strict=True)) * middle / middle.norm()


def task_vectors(elect: bool, normalize: bool, keep):
    def formula(values, base, settings, top):
        found = [each("weight", 1.0) for each in settings]
        deltas = [keep(v - base, each) for v, each in zip(values, settings, strict=True)]
        parts = torch.stack([w * d for w, d in zip(found, deltas, strict=True)])
        agree = torch.ones_like(parts)
        if elect:
            sign = torch.where(parts.sum(0) >= 0, 1.0, -1.0)
            agree = (torch.sign(torch.stack(deltas)) == sign).double()
        total = (parts * agree).sum(0)
        if top("normalize", normalize):
            shares = sum(w * a for w, a in zip(found, agree, strict=True))
            total = total / torch.where(shares.abs() < 1e-8, 1.0, shares)
        return base + top("lambda", 1.0) * total

    return formula


def largest(delta, each):
    count = max(1, int(each("density", 1.0) * delta.numel()))
    order = delta.abs().flatten().argsort(descending=True)
    mask = torch.zeros(delta.numel(), dtype=torch.float64)
    mask[order[:count]] = 1
    return delta * mask.view_as(delta)


def middle(delta, each):
    size = delta.numel()
    top = int(each("gamma", 0.01) * size)
    bottom = size - int(each("density", 1.0) * size) - top
    top, bottom = (top + bottom, 0) if bottom < 0 else (top, bottom)
    order = delta.abs().flatten().argsort()
    mask = torch.zeros(size, dtype=torch.float64)
    mask[order[bottom : size - top]] = 1
    return delta * mask.view_as(delta)


def model_stock(values, base, settings, top):
    deltas = [v - base for v in values]
    pairs = [(a, b) for i, a in enumerate(deltas) for b in deltas[:i]]
    cosine = sum(float((a * b).sum() / (a.norm() * b.norm())) for a, b in pairs) / len(pairs)
    t = len(deltas) * cosine / (1 + (len(deltas) - 1) * cosine)
    return t * sum(values) / len(values) + (1 - t) * base


FORMULAS = {
    "linear": linear,
    "slerp": slerp,
    "nuslerp": nuslerp,
    "multislerp": multislerp,
    "task_arithmetic": task_vectors(False, False, lambda delta, each: delta),
    "dare_linear": task_vectors(False, False, lambda delta, each: delta),
    "ties": task_vectors(True, True, largest),
    "breadcrumbs": task_vectors(False, False, middle),
    "breadcrumbs_ties": task_vectors(True, False, middle),
    "model_stock": model_stock,
    "nearswap": lambda values, base, settings, top: base + (values[0] - base).clamp(-top("t", 0), top("t", 0)),
    "passthrough": lambda values, base, settings, top: values[0] * settings[0]("scale", 1.0),
}
