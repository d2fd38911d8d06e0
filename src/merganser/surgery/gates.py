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
#: Texts that the base writes for its mean states, their length in tokens, and the ridge of the discriminant.
_TEXTS, _LENGTH, _RIDGE = 16, 128, 3.0


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
        return singular_gates(base, experts, _capture_mlp_inputs(recipe, base, layers))
    embed = _build_embedder(recipe, base, layers)
    return torch.stack([_unit(embed(entry.positive) - embed(entry.negative)) for entry in entries], dim=1)


def _unit(vectors: Tensor) -> Tensor:
    return vectors.div(vectors.norm(dim=-1, keepdim=True).clamp(min=1e-8))


def _build_embedder(recipe: MoERecipe, base: Checkpoint, layers: int) -> Callable[[Sequence[str]], Tensor]:
    """Return a function from prompts to a vector per layer, (layers, hidden), zero without prompts."""
    transformers = require("transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(_require_runnable(recipe, base).directory)
    except (OSError, ValueError) as error:  # transformers has no common kind for absent and damaged files
        raise InputError(
            f"gate_mode: {recipe.gate_mode} reads the prompts with the tokenizer of {base.label}, which cannot be "
            "loaded; put its files beside the weights, or use singular or random gates, which need no prompts"
        ) from error

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
        return torch.stack(found).mean(0) if found else torch.zeros(layers, model.config.hidden_size)

    return states


def _require_runnable(recipe: MoERecipe, base: Checkpoint) -> Checkpoint:
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


def _capture_mlp_inputs(recipe: MoERecipe, base: Checkpoint, layers: int) -> list[Tensor]:
    """Return what enters the MLP of every layer, (tokens, hidden), while the base writes a few texts."""
    model = _load_base(require("transformers", "hf"), _require_runnable(recipe, base))
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
    """Return gates without prompts: the linear discriminant between the inputs that the experts were tuned on.

    An expert's change of the gate and up projections, Δ_e = [ΔW_gate; ΔW_up] = U Σ Vᵀ, is a sum of products with the
    states it was tuned on, so that its right singular vectors tell their second moment, C_e = VΣ²Vᵀ / ‖Σ‖², in units of
    the mean square of a state. The mean state m of the base gives the mean along them, μ_e = C_e m / √(mᵀ C_e m), and
    Fisher's discriminant the gate, (C̄ + r c I)⁻¹ μ_e, with C̄ the mean of the C_e and c that of its diagonal.

    Args:
        base: What the experts were fine-tuned from.
        experts: The fine-tuned models.
        states: For every layer the normed states that enter its MLP, (samples, hidden).

    Returns:
        The gates, (layers, experts, hidden); zero for an expert that equals the base.
    """
    gates = []
    for layer, own in enumerate(states):
        inputs = own.double()
        mean, square = inputs.mean(0), inputs.pow(2).sum(1).mean()
        moments = [square * _compute_second_moment(base, expert, f"model.layers.{layer}.mlp.") for expert in experts]
        along = torch.stack([moment @ mean for moment in moments])
        means = along / (along @ mean).clamp(min=1e-300).sqrt().unsqueeze(1)
        within = torch.stack(moments).mean(0)
        ridge = _RIDGE * within.diagonal().mean().clamp(min=1e-300) * torch.eye(len(mean), dtype=torch.float64)
        gates.append(torch.linalg.solve(within + ridge, means.T).T.float())
    return torch.stack(gates)


def _compute_second_moment(base: Checkpoint, expert: Checkpoint, prefix: str) -> Tensor:
    """Return ΔᵀΔ / ‖Δ‖² = VΣ²Vᵀ / ‖Σ‖² of the projections that read the states; zero without a change."""
    changes = [
        expert.read(name).double() - base.read(name).double()
        for name in (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    ]
    gram = torch.stack([change.T @ change for change in changes]).sum(0)
    return gram / gram.trace().clamp(min=1e-300)
