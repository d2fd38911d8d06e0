"""Planted permutations in networks nobody here wrote, with derived symmetries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from align_networks import noisy_copies

from merganser.align import symmetry
from merganser.align.permutations import compose, inverse
from merganser.align.solver import objective_of
from merganser.align.universes import universe

transformers = pytest.importorskip("transformers")


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.arange(8)[None]}


def llama():
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.arange(8)[None]}


def vit():
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.parametrize("make", [gpt2, llama, vit])
def test_planted_permutations_are_recovered_exactly(make):
    """Three copies, noise 5 % of each tensor's spread, seed 0."""
    torch.manual_seed(0)
    module, inputs = make()
    for parameter in module.parameters():
        if parameter.dim() == 1:  # biases and norms are constant at initialisation
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    known = symmetry(module.eval(), inputs)
    copies, planted = noisy_copies(module.state_dict(), known, 3, noise=0.05, seed=0)
    found = universe(copies, known)
    assert found.objective >= objective_of(copies, [inverse(known, p) for p in planted], known) * (1 - 1e-6)
    for source in (1, 2):
        expected = compose(known, inverse(known, planted[source]), planted[0])
        for name, index in found.pairwise(0, source).items():
            np.testing.assert_array_equal(index, expected[name])
