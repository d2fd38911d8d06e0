"""Combine dense models into a mixture of experts (upcycling by merging)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint, Rows, TensorSpec, View
from merganser.checkpoints.cards import Lineage
from merganser.checkpoints.json_file import read_config
from merganser.checkpoints.memory import StateDict
from merganser.checkpoints.opening import open as open_checkpoint
from merganser.checkpoints.sidecars import Edit, Sidecars, freeze_edits
from merganser.engine.merge import Merge
from merganser.engine.nested import Merged
from merganser.engine.plan import Model, Output, Plan, Source
from merganser.errors import InputError
from merganser.recipes.references import locate
from merganser.recipes.sidecar_plan import dtype_edits
from merganser.surgery.gates import build_gates
from merganser.surgery.moe_layouts import MoELayout, choose_layout
from merganser.surgery.moe_recipes import ExpertEntry, MoERecipe, load_moe

_PARTS = ("gate_proj", "up_proj", "down_proj")


def moe(recipe: str | os.PathLike[str] | Mapping[str, Any] | MoERecipe) -> Merged:
    """Make a mixture of experts from dense models: the base's attention, every expert's MLPs, and gates.

    mergekit-moe's recipes run as they are. Mixtral (of Llama and Mistral models), Qwen2-MoE, Qwen3-MoE and DeepSeek
    layouts, named as their checkpoints on the hub are, so that other programs read them. transformers loads DeepSeek's
    with the code on the hub that its config names (`auto_map`, `trust_remote_code=True`, transformers 4).

    Args:
        recipe: The path of a YAML file, a mapping, or what `load_moe` returned.

    Returns:
        The mixture as a checkpoint, whose weights are read as it is; `mg.save` writes it with its config and tokenizer.

    Raises:
        InputError: If the recipe is wrong or the models do not fit; before any weights are read.

    Example:
        >>> mg.save(mg.surgery.moe("moe.yml"), "out/")  # doctest: +SKIP
    """
    asked = recipe if isinstance(recipe, MoERecipe) else load_moe(recipe)
    entries = (*asked.experts, *asked.shared)
    base = _open(asked.base, "base_model", asked)
    experts = [_add_noise(_open(each.path, each.where, asked), each, asked.seed) for each in entries]
    configs = [read_config(model.directory) for model in (base, *experts)]
    labels = [asked.base, *(each.path for each in entries)]
    layout = choose_layout(asked, configs, labels)
    layers = _check_shapes(base, experts, labels, layout, configs[0])
    gates = build_gates(asked, base, entries, experts, layers)
    made = StateDict(_make_tensors(layout, base, gates, len(asked.experts), layers), "gates")
    outputs = _plan_outputs(layout, base, experts, entries, len(asked.experts), layers, made)
    dtype = getattr(torch, asked.dtype) if asked.dtype else None
    if dtype is not None:
        outputs = [replace(output, spec=TensorSpec(output.spec.shape, dtype)) for output in outputs]
    edits: list[Edit] = [([key], value) for key, value in layout.config(configs[0], asked).items()]
    sidecars = Sidecars(
        config=freeze_edits([*edits, *dtype_edits(configs[0], asked.dtype)]),
        lineage=Lineage(asked.base, tuple(dict.fromkeys(labels[1:])), (f"moe ({asked.gate_mode} gates)",)),
        recipe=asked.written,
    )
    models = [Model(label, locate(label, asked.root)) for label in labels]
    plan = Plan(
        models=(*models, Model("gates")),
        outputs=tuple(outputs),
        aliases=dict(base.aliases()),
        seed=asked.seed,
        sidecars=sidecars,
        notes=(*layout.notes(), *_note_alike_gates(asked, gates)),
    )
    return Merged(Merge(plan, (base, *experts, made)), f"{layout.name} of {len(asked.experts)} experts")


def _open(reference: str, where: str, recipe: MoERecipe) -> Checkpoint:
    try:
        return open_checkpoint(locate(reference, recipe.root))
    except InputError as error:
        raise type(error)(f"{where}: {error}") from error


def _add_noise(model: Checkpoint, entry: ExpertEntry, seed: int) -> Checkpoint:
    return Noised(model, entry.noise, f"{seed} {entry.where}") if entry.noise else model


def _check_shapes(
    base: Checkpoint, experts: Sequence[Checkpoint], labels: Sequence[str], layout: MoELayout, config: Mapping[str, Any]
) -> int:
    """Check that all MLPs have the shapes of the base's, and return the number of layers."""
    layers = 0
    while f"model.layers.{layers}.mlp.gate_proj.weight" in base:
        layers += 1
    if not layers or layers != config.get("num_hidden_layers", layers):
        raise InputError(f"{labels[0]}: expected an MLP with gate_proj, up_proj and down_proj in every layer")
    placed = ("q_proj", "k_proj", "v_proj") if layout.biases else ()
    _refuse_biases(base, labels[0], "self_attn", placed, layout)
    for label, expert in zip(labels[1:], experts, strict=True):
        _refuse_biases(expert, label, "mlp", (), layout)
        if any(name.startswith(f"model.layers.{layers}.") for name in expert.names()):
            raise InputError(f"{label} has more than the {layers} layers of {labels[0]}; experts must have as many")
        for layer in range(layers):
            for part in _PARTS:
                name = f"model.layers.{layer}.mlp.{part}.weight"
                if name not in expert:
                    raise InputError(f"{label} has no {name!r}; experts must have the {layers} layers of {labels[0]}")
                if expert.spec(name).shape != base.spec(name).shape:
                    raise InputError(
                        f"{name!r} is {expert.spec(name)} in {label} and {base.spec(name)} in {labels[0]}: experts "
                        "must have the sizes of the base"
                    )
    return layers


def _refuse_biases(model: Checkpoint, label: str, module: str, placed: Sequence[str], layout: MoELayout) -> None:
    """Refuse biases of one module of the layers, except those of its parts that have a place in the mixture."""
    for name in model.names():
        if f".{module}." in name and name.endswith(".bias") and name.split(".")[-2] not in placed:
            raise InputError(f"{label} has {name!r}, for which {layout.name} has no place")


def _make_tensors(layout: MoELayout, base: Checkpoint, gates: Tensor, routed: int, layers: int) -> dict[str, Tensor]:
    """Return the tensors that no model has: gates, and zero biases if the layout has biases."""
    dtype = base.spec("model.embed_tokens.weight").dtype
    found = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found[f"{prefix}{layout.mlp}.gate.weight"] = gates[layer, :routed].contiguous()
        if layout.shared_gate:
            found[f"{prefix}{layout.mlp}.shared_expert_gate.weight"] = gates[layer, routed:].contiguous()
        for part in "qkv" if layout.biases else "":
            name = f"{prefix}self_attn.{part}_proj"
            if f"{name}.bias" not in base:
                found[f"{name}.bias"] = torch.zeros(base.spec(f"{name}.weight").shape[0])
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def _plan_outputs(
    layout: MoELayout,
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    entries: Sequence[ExpertEntry],
    routed: int,
    layers: int,
    made: Checkpoint,
) -> list[Output]:
    """Return the outputs: the base's tensors, the gates, and the experts' MLPs under their new names."""
    found = [
        Output(name, base.spec(name), "passthrough", (Source(0, name),)) for name in base.names() if ".mlp." not in name
    ]
    for layer in range(layers):
        for i, (expert, entry) in enumerate(zip(experts, entries, strict=True)):
            module, parts = (f"experts.{i}", layout.parts) if i < routed else (layout.shared_module, _PARTS)
            for part, theirs in zip(_PARTS, parts, strict=True):
                name = f"model.layers.{layer}.mlp.{part}.weight"
                target = f"model.layers.{layer}.{layout.mlp}.{module}.{theirs}.weight"
                scaled = {"scale": [entry.scale]} if part == "down_proj" and entry.scale != 1 else {}
                found.append(Output(target, expert.spec(name), "passthrough", (Source(i + 1, name),), None, scaled))
    last = len(experts) + 1
    return [*found, *(Output(n, made.spec(n), "passthrough", (Source(last, n),)) for n in made.names())]


def _note_alike_gates(recipe: MoERecipe, gates: Tensor) -> list[str]:
    """Return notes on gates that hardly differ, which choose the same experts for everything."""
    conditions = torch.linalg.cond(gates[:, : len(recipe.experts)].double())
    alike = (conditions > 5).nonzero().flatten().tolist()
    paths = {each.path for each in recipe.experts}
    notes = []
    if alike and len(recipe.experts) > 1:
        shown = "all layers" if len(alike) == len(gates) else f"{len(alike)} of {len(gates)} layers"
        notes.append(f"the gates of {shown} are much alike: some experts will hardly be used; let prompts differ more")
    if len(paths) == 1 and len(recipe.experts) > 1:
        notes.append("all experts are the same model: without training, the mixture does what that model does")
    return notes


class Noised(View):
    """A model with Gaussian noise on its MLPs, drawn per row from its name and index."""

    def __init__(self, source: Checkpoint, scale: float, key: str) -> None:
        super().__init__(source, f"{source.label} with noise {scale:g} ({key})")
        self._scale, self._key = scale, key

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self.source.read(name, rows)
        if ".mlp." not in name or tensor.dim() != 2:
            return tensor
        seed = int.from_bytes(hashlib.sha256(f"{self._key} {name}".encode()).digest()[:7], "little")
        first = rows[0] if rows else 0
        generator = torch.Generator()
        noise = [
            torch.randn(tensor.shape[1], generator=generator.manual_seed(seed + first + i)) for i in range(len(tensor))
        ]
        return tensor.float() + self._scale * torch.stack(noise) if noise else tensor
