"""Recipes for mixtures of experts, in the format of mergekit-moe.

base_model: ./base                # attention, norms, embeddings
gate_mode: hidden                 # hidden, hidden_avg, cheap_embed, random, uniform_random or singular
experts_per_token: 2
dtype: bfloat16
experts:
  - source_model: ./math          # its MLPs become an expert
    positive_prompts: ["Solve the equation"]
    negative_prompts: ["Write a poem"]
  - source_model: ./code
    positive_prompts: ["def main():"]
shared_experts: [...]             # Qwen2-MoE and DeepSeek
architecture: mixtral             # mixtral, qwen2, qwen3 or deepseek; by default what the models allow
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from merganser.errors import RecipeError, did_you_mean
from merganser.recipes import documents, fields
from merganser.recipes.fields import expect, report_unknown_keys
from merganser.recipes.mergekit import read_reference
from merganser.recipes.schema import Problems

GATES = ("hidden", "hidden_last", "hidden_avg", "cheap_embed", "random", "uniform_random", "uniform", "singular")
#: Gates that are computed from prompts.
PROMPTED = ("hidden", "hidden_last", "hidden_avg", "cheap_embed")
_KEYS = ("base_model", "experts", "gate_mode", "dtype", "experts_per_token", "shared_experts", "architecture", "seed")
_NO_RANKS = (
    "no mixture that transformers loads has experts of low rank over a shared MLP: each expert is an MLP of its own; "
    "extract an adapter of each expert (merganser extract-lora) and let PEFT's Arrow route between them"
)
_EXPERT_KEYS = ("source_model", "positive_prompts", "negative_prompts", "noise_scale", "residual_scale")


@dataclass(frozen=True)
class ExpertEntry:
    """A model whose MLPs become an expert, and the prompts for its gate."""

    path: str
    where: str
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    noise: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class MoERecipe:
    """The recipe of a mixture of experts.

    Attributes:
        base: The model of attention, norms and embeddings.
        experts: The models whose MLPs become experts.
        shared: Experts that every token uses.
        gate_mode: How gates are made.
        per_token: Experts per token; by default two, or one beside DeepSeek's shared expert.
        dtype: The dtype of the output; that of the base by default.
        architecture: `"mixtral"`, `"qwen2"`, `"qwen3"` or `"deepseek"`; by default what the models allow.
        seed: Of random gates and noise.
        written: The text or document it was read from.
        root: The directory of its file.

    Example:
        >>> experts = [{"source_model": "math"}, {"source_model": "code"}]
        >>> document = {"base_model": "base", "gate_mode": "random", "experts": experts}
        >>> mg.surgery.load_moe(document).gate_mode
        'random'
    """

    base: str
    experts: tuple[ExpertEntry, ...]
    shared: tuple[ExpertEntry, ...] = ()
    gate_mode: str = "hidden"
    per_token: int | None = None
    dtype: str | None = None
    architecture: str | None = None
    seed: int = 0
    written: str | Mapping[str, Any] = ""
    root: Path | None = None


def load_moe(source: str | os.PathLike[str] | Mapping[str, Any]) -> MoERecipe:
    """Read a recipe for a mixture of experts, in the format of mergekit-moe.

    Args:
        source: The path of a YAML file, or a mapping.

    Returns:
        The recipe.

    Raises:
        RecipeError: With every problem of the recipe.

    Example:
        >>> experts = [{"source_model": "math"}, {"source_model": "code"}]
        >>> document = {"base_model": "base", "gate_mode": "random", "experts": experts}
        >>> len(mg.surgery.load_moe(document).experts)
        2
    """
    if isinstance(source, Mapping):
        return _read(dict(source), source, None, "recipe")
    path = Path(source)
    document, text = documents.read_single(path, "a recipe with base_model and experts")
    return _read(document, text, path.parent, str(path))


def _read(data: dict[str, Any], written: str | Mapping[str, Any], root: Path | None, source: str) -> MoERecipe:
    problems = Problems()
    if "expert_rank" in data:
        problems.add("expert_rank", _NO_RANKS)
    report_unknown_keys({key: value for key, value in data.items() if key != "expert_rank"}, _KEYS, "", problems)
    gate = str(data.get("gate_mode") or "hidden")
    if gate not in GATES:
        problems.add("gate_mode", f"unknown gate {gate!r}{did_you_mean(gate, GATES)}")
    experts = _read_experts(data.get("experts"), "experts", problems)
    shared = _read_experts(data.get("shared_experts") or [], "shared_experts", problems)
    base, dtype, architecture, per_token, seed = "", None, None, None, 0
    with problems.collect():
        base = read_path(data.get("base_model"), "base_model")
    with problems.collect():
        dtype = fields.read_dtype(data["dtype"], "dtype") if data.get("dtype") else None
    with problems.collect():
        architecture = expect(data["architecture"], str, "architecture") if data.get("architecture") else None
    with problems.collect():
        seed = expect(data.get("seed", 0), int, "seed")
    with problems.collect():
        if (stated := data.get("experts_per_token")) is not None:
            per_token = expect(stated, int, "experts_per_token")
        if experts and per_token is not None and not 1 <= per_token <= len(experts):
            raise RecipeError(
                f"experts_per_token: expected 1 to {len(experts)}, the number of experts; got {per_token}"
            )
    if not experts and not problems:
        problems.add("experts", "expected a list of experts, each with a source_model")
    if gate in PROMPTED:
        _check_prompts(experts, gate, problems)
    problems.finish(source)
    return MoERecipe(base, experts, shared, gate, per_token, dtype, architecture, seed, written, root)


def _check_prompts(experts: tuple[ExpertEntry, ...], gate: str, problems: Problems) -> None:
    for expert in experts:
        if not expert.positive:
            others = "gate_mode: singular, random or uniform_random needs none"
            problems.add(f"{expert.where}.positive_prompts", f"gate_mode: {gate} needs prompts; {others}")
    if (
        len(experts) > 1
        and len({(expert.positive, expert.negative) for expert in experts}) == 1
        and experts[0].positive
    ):
        problems.add("experts", "all have the same prompts, so that every gate would be the same")


def _read_experts(raw: Any, where: str, problems: Problems) -> tuple[ExpertEntry, ...]:
    found = []
    with problems.collect():
        for i, each in enumerate(expect(raw if raw is not None else [], list, where)):
            place = f"{where}[{i}]"
            with problems.collect():
                expect(each, dict, place)
                report_unknown_keys(each, _EXPERT_KEYS, place, problems)
                noise, scale = (_number(each.get(key), f"{place}.{key}") for key in ("noise_scale", "residual_scale"))
                found.append(
                    ExpertEntry(
                        read_path(each.get("source_model"), f"{place}.source_model"),
                        place,
                        _read_prompts(each.get("positive_prompts"), f"{place}.positive_prompts"),
                        _read_prompts(each.get("negative_prompts"), f"{place}.negative_prompts"),
                        noise or 0.0,
                        1.0 if scale is None else scale,
                    )
                )
    return tuple(found)


def read_path(raw: Any, where: str) -> str:
    """Return a reference, which mergekit also writes as a mapping {model: {path, revision}, lora: …}."""
    if isinstance(raw, dict) and "model" in raw and (strange := [key for key in raw if key not in ("model", "lora")]):
        raise RecipeError(f"{where}: unknown key {strange[0]!r}{did_you_mean(str(strange[0]), ('model', 'lora'))}")
    return read_reference(raw, where)


def _read_prompts(raw: Any, where: str) -> tuple[str, ...]:
    texts = expect(raw or [], list, where)
    return tuple(expect(text, str, f"{where}[{i}]") for i, text in enumerate(texts))


def _number(raw: Any, where: str) -> float | None:
    if raw is None:
        return None
    plain = fields.unquote(raw)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)) or not isfinite(plain):
        raise RecipeError(f"{where}: expected a finite number, got {fields.kind_of(raw)}")
    return float(plain)
