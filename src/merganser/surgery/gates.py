"""Build the gates of a mixture of experts made of dense models: a matrix (experts, hidden) per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.row_runs import gather
from merganser.errors import InputError, require
from merganser.surgery.moe_recipes import ExpertEntry, MoERecipe

_EMBEDDING = "model.embed_tokens.weight"
#: Texts that the base writes to calibrate gates on, their length in tokens, and the ridge of the regression on them.
_TEXTS, _LENGTH, _RIDGE = 16, 128, 1e-2


def build_gates(
    recipe: MoERecipe, base: Checkpoint, entries: Sequence[ExpertEntry], experts: Sequence[Checkpoint], layers: int
) -> Tensor:
    """Return the gates of routed and shared experts, (layers, experts, hidden), float32.

    | gate_mode | the gate of an expert |
    |---|---|
    | `hidden` | unit vector of the hidden state that enters the layer, at the prompts' last tokens |
    | `hidden_avg` | the same, averaged over the tokens |
    | `cheap_embed` | unit vector of the sum of the prompts' token embeddings, the same for every layer |
    | `random`, `uniform_random` | drawn from N(0, 1), or as `nn.Linear` is initialised |
    | `singular` | from the weights of the experts: see `singular_gates` |

    Negative prompts are subtracted before the vector is made a unit vector.

    Args:
        recipe: The recipe.
        base: The base model.
        entries: The routed experts, then the shared ones.
        experts: Their models.
        layers: The number of layers.
    """
    hidden = base.spec(_EMBEDDING).shape[1]
    if recipe.gate_mode in ("random", "uniform_random", "uniform"):
        generator = torch.Generator().manual_seed(recipe.seed)
        if recipe.gate_mode == "random":
            return torch.randn((layers, len(entries), hidden), generator=generator)
        drawn = torch.rand((layers, len(entries), hidden), generator=generator)
        return (2 * drawn - 1).div(hidden**0.5)
    if recipe.gate_mode == "singular":
        return singular_gates(base, experts, _mlp_inputs(recipe, base, layers))
    embed = _embedder(recipe, base, layers)
    return torch.stack([_unit(_contrast(entry, embed)) for entry in entries], dim=1)


def _contrast(entry: ExpertEntry, embed: Callable[[Sequence[str]], Tensor]) -> Tensor:
    return embed(entry.positive) - embed(entry.negative) if entry.negative else embed(entry.positive)


def _unit(vectors: Tensor) -> Tensor:
    return vectors.div(vectors.norm(dim=-1, keepdim=True).clamp(min=1e-8))


def _embedder(recipe: MoERecipe, base: Checkpoint, layers: int) -> Callable[[Sequence[str]], Tensor]:
    """Return a function from prompts to a vector per layer, (layers, hidden)."""
    transformers = require("transformers", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(_runnable(recipe, base).directory)

    def ids(prompt: str) -> list[int]:
        found: list[int] = tokenizer((tokenizer.bos_token or "") + prompt, add_special_tokens=False)["input_ids"]
        if not found:
            raise InputError(f"the prompt {prompt!r} has no tokens")
        return found

    if recipe.gate_mode == "cheap_embed":

        def embed(prompts: Sequence[str]) -> Tensor:
            rows = torch.tensor([i for prompt in prompts for i in ids(prompt)]).numpy()
            return _unit(gather(base, _EMBEDDING, rows).float().sum(0)).expand(layers, -1)

        return embed
    model = _load_base(transformers, base)

    def states(prompts: Sequence[str]) -> Tensor:
        found = []
        for prompt in prompts:  # one by one: padding would enter the average, or be the last token
            with torch.inference_mode():
                output = model(input_ids=torch.tensor([ids(prompt)]), output_hidden_states=True)
            inputs = torch.cat(output.hidden_states[:layers]).float()  # (layers, tokens, hidden)
            found.append(inputs.mean(1) if recipe.gate_mode == "hidden_avg" else inputs[:, -1])
        return torch.stack(found).mean(0)

    return states


def _runnable(recipe: MoERecipe, base: Checkpoint) -> Checkpoint:
    """Return the base, which must have a config to be run."""
    if base.directory is None or not (base.directory / "config.json").is_file():
        raise InputError(f"gate_mode: {recipe.gate_mode} runs {base.label}, which has no config.json")
    return base


def _load_base(transformers: Any, base: Checkpoint) -> Any:
    """Return the base in float32 with the weights of the checkpoint, including an adapter."""
    config = transformers.AutoConfig.from_pretrained(base.directory)
    with torch.random.fork_rng(devices=[]):  # weights are drawn first
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.load_state_dict({name: base.read(name).float() for name in base.names()}, strict=False)
    model.tie_weights()
    return model


def _mlp_inputs(recipe: MoERecipe, base: Checkpoint, layers: int) -> list[Tensor]:
    """Return what enters the MLP of every layer, (tokens, hidden), while the base writes a few texts."""
    model = _load_base(require("transformers", "hf"), _runnable(recipe, base))
    kept: list[list[Tensor]] = [[] for _ in range(layers)]
    for own, layer in zip(kept, model.model.layers, strict=True):
        layer.post_attention_layernorm.register_forward_hook(lambda _m, _i, output, own=own: own.append(output[:, -1]))
    begin = model.config.bos_token_id
    tokens, past = torch.full((_TEXTS, 1), 0 if begin is None else begin), None
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.inference_mode():
        for _ in range(_LENGTH):
            output = model(input_ids=tokens, past_key_values=past, use_cache=True)
            past = output.past_key_values
            tokens = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
    return [torch.cat(own) for own in kept]


def singular_gates(base: Checkpoint, experts: Sequence[Checkpoint], states: Sequence[Tensor]) -> Tensor:
    """Return gates without prompts: an expert is chosen for hidden states with energy in its task singular vectors.

    An expert's change of the gate and up projections, Δ_e = [ΔW_gate; ΔW_up] = U Σ Vᵀ, says which inputs it was tuned
    for. The energy of a normed hidden state h in its leading right singular vectors (a 1/experts share of them, as in
    TSV-Merge), E_e(h) = ‖Σ_k V_kᵀ h‖² / ‖Σ_k‖², is quadratic and a gate is linear, so the gate is the ridge regression
    of log E_e(h), standardised over experts and inputs, on h. Its slope is that of the energy at the mean state, so it
    must be fitted on states like those the gate will see.

    Args:
        base: What the experts were fine-tuned from.
        experts: The fine-tuned models.
        states: For every layer the normed states that enter its MLP, (samples, hidden).

    Returns:
        The gates, (layers, experts, hidden).
    """
    gates = []
    for layer, own in enumerate(states):
        inputs = own.double()
        prefix = f"model.layers.{layer}."
        energies = torch.stack([_energy(base, expert, prefix, inputs, len(experts)) for expert in experts], dim=1)
        scores = energies.clamp(min=1e-12).log()
        scores = scores - scores.mean(1, keepdim=True)
        scores = (scores - scores.mean(0)) / scores.std().clamp(min=1e-12)
        gram = inputs.T @ inputs
        ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        gates.append(torch.linalg.solve(gram + ridge, inputs.T @ scores).T.float())
    return torch.stack(gates)


def _energy(base: Checkpoint, expert: Checkpoint, prefix: str, states: Tensor, share: int) -> Tensor:
    """Return E_e(h) for each state; zero for an expert that equals the base."""
    gram = torch.zeros((states.shape[1], states.shape[1]), dtype=torch.float64)
    for part in ("gate_proj", "up_proj"):
        name = f"{prefix}mlp.{part}.weight"
        change = expert.read(name).double() - base.read(name).double()
        gram += change.T @ change
    values, vectors = torch.linalg.eigh(gram)
    kept = max(1, len(values) // share)
    values, vectors = values[-kept:].clamp(min=0), vectors[:, -kept:]
    energy: Tensor = (states @ vectors).pow(2).mul(values).sum(1)
    return energy.div(values.sum().clamp(min=1e-300))
