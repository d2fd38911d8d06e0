"""Low-rank experts over a shared dense model: extracted adapters in PEFT's Arrow, as the guide shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.library.lora import extract_lora

MLPS = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(2) for part in ("gate", "up", "down")]


@pytest.fixture
def tuned(llama, tmp_path):
    """A base, two experts that differ from it by rank 2 in every MLP, and an adapter of each."""
    base = llama("base")
    experts = []
    for seed, name in enumerate(("math", "code"), 1):
        expert = llama(name)
        weights = load_file(base / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        for key in MLPS:
            rows, columns = weights[key].shape
            left, right = (torch.randn(n, 2, generator=generator) for n in (rows, columns))
            weights[key] = weights[key] + 0.2 * left @ right.T
        save_file(weights, expert / "model.safetensors", {"format": "pt"})
        extract_lora(expert, base, tmp_path / f"{name}-lora", rank=2, include=["*.mlp.*"], dtype="float32")
        experts.append(expert)
    return base, experts, [tmp_path / "math-lora", tmp_path / "code-lora"]


def routed(base, adapters, top_k):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.create_arrow_model(model, [str(path) for path in adapters], peft.ArrowConfig(top_k=top_k)).eval()


def test_an_expert_beside_itself_is_that_expert(tuned):
    transformers = pytest.importorskip("transformers")
    base, experts, adapters = tuned
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        found = routed(base, [adapters[0], adapters[0]], 2)(input_ids=tokens).logits
        expected = transformers.AutoModelForCausalLM.from_pretrained(experts[0])(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_are_routed_by_singular_vectors_and_the_model_generates(tuned):
    base, experts, adapters = tuned
    model = routed(base, adapters, 2)
    own, *tuned_weights = (load_file(path / "model.safetensors") for path in (base, *experts))
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = model.get_base_model().model.layers[0].mlp.gate_proj(states)
    weight = own[MLPS[0]].double().numpy()
    changes = [each[MLPS[0]].double().numpy() - weight for each in tuned_weights]
    x = states.double().numpy()
    scores = np.stack([np.abs(x @ np.linalg.svd(change)[2][0]) for change in changes], axis=1)
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    expected = x @ weight.T + sum(shares[:, [e]] * (x @ change.T) for e, change in enumerate(changes))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-3)
    assert model.generate(input_ids=torch.arange(4)[None], max_new_tokens=3, do_sample=False).shape == (1, 7)
