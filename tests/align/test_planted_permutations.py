"""The default matching finds permutations planted in networks nobody here wrote, and says how sure it is."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from align_networks import mlp, trained_like
from torch import Tensor, nn

from merganser.align import Symmetry, match, symmetry
from merganser.align.matches import Match, Try
from merganser.align.permutations import apply, identity, inverse, random
from merganser.align.solver import objective_of
from merganser.errors import InputError

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(18).reshape(2, 9)
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}

TIMM: dict[str, Callable[[Any], nn.Module]] = {
    "mixer": lambda timm: timm.models.MlpMixer(img_size=32, patch_size=8, num_blocks=4, embed_dim=32, num_classes=4),
    "vit": lambda timm: timm.create_model(
        "vit_tiny_patch16_224", depth=2, embed_dim=96, img_size=32, patch_size=8, num_classes=4
    ),
    "convnext": lambda timm: timm.create_model("convnext_atto", depths=(1, 1, 2, 1), num_classes=4),
    "resnet": lambda timm: timm.models.ResNet(
        timm.models.resnet.Bottleneck, (2, 2, 2, 2), channels=(16, 32, 32, 64), stem_width=16, num_classes=4
    ),
}
TRANSFORMERS: dict[str, Callable[[Any], nn.Module]] = {
    "gpt2": lambda t: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=40, n_embd=32, n_layer=4, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    ),
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(num_hidden_layers=2, max_position_embeddings=16, **SIZES)),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, **SIZES)),
}


DERIVED: dict[str, tuple[nn.Module, Symmetry]] = {}


def derived(name: str, make: Callable[[], nn.Module], inputs: Tensor) -> tuple[nn.Module, Symmetry]:
    """A network and its symmetry, derived once for all seeds."""
    if name not in DERIVED:
        torch.manual_seed(0)
        net = make().eval()
        DERIVED[name] = net, symmetry(net, inputs, self_test=False)
    return DERIVED[name]


def planted(net: nn.Module, found: Symmetry, noise: float, seed: int) -> tuple[Match, float, bool]:
    """The match of a noisy scrambled copy, the objective of the planted permutations, and whether they were found."""
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    other = dict(state)
    for name in found.objective:
        spread = noise * float(state[name].std()) if state[name].numel() > 1 else 0.0
        other[name] = state[name] + spread * torch.randn(state[name].shape, generator=generator)
    secret = random(found, seed)
    matched = match(state, apply(found, secret, other), found)
    back = inverse(found, secret)
    same = all(np.array_equal(index, back[name]) for name, index in matched.permutations.items())
    return matched, objective_of([state, other], [identity(found)] * 2, found), same


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("name", TIMM)
def test_planted_in_vision_models(timm: ModuleType, name: str, noise: float, seed: int) -> None:
    matched, expected, same = planted(*derived(name, lambda: TIMM[name](timm), IMAGE), noise, seed)
    assert matched.objective >= expected * (1 - 1e-5)
    assert same or matched.objective >= expected
    assert matched.optimal == (noise == 0.0)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_planted_in_language_models(transformers: ModuleType, name: str, seed: int) -> None:
    matched, expected, _ = planted(*derived(name, lambda: TRANSFORMERS[name](transformers), TOKENS), 0.0, seed)
    assert matched.objective >= expected * (1 - 1e-5)
    assert matched.optimal
    assert matched.note is None
    assert len(matched.tries) == 1  # the bound is reached: nothing more to look for


def test_several_tries_keep_the_best_and_say_when_they_disagree() -> None:
    module, known = mlp(8, 20, 20, 20, 4)
    a, b = trained_like(module, 1), trained_like(module, 2)
    found = match(a, b, known, tries=5, seed=3)
    assert [one.start for one in found.tries] == ["propagate", *["identity"] * 4]
    assert [one.seed for one in found.tries] == [3, 4, 5, 6, 7]
    assert found.objective == max(one.objective for one in found.tries)
    assert found.objective <= found.bound
    assert "local optimum" in str(found.note)
    again = match(a, b, known, tries=5, seed=3)
    assert again.tries == found.tries
    assert all(np.array_equal(again.permutations[name], index) for name, index in found.permutations.items())
    alone = match(a, b, known, start="identity", tries=1, seed=5)
    assert alone.tries[0].objective == found.tries[2].objective
    assert alone.note is None  # one try says nothing about others


def test_the_note_is_about_agreement() -> None:
    _, known = mlp(3, 4, 2)
    tries = [Try("propagate", 0, 10.0, 0.1), Try("identity", 1, 9.0, 0.1)]
    assert "10 from propagate, 9 from identity" in str(Match(known, {}, 10.0, (), tuple(tries), 20.0).note)
    agreeing = (*tries, Try("identity", 2, 10.0, 0.1))
    assert Match(known, {}, 10.0, (), agreeing, 20.0).note is None
    assert Match(known, {}, 10.0, (), tuple(tries), 10.0).note is None


def test_random_starts_of_frank_wolfe_are_told_apart() -> None:
    module, known = mlp(8, 20, 20, 4)
    a, b = trained_like(module, 1), trained_like(module, 2)
    found = match(a, b, known, "frank_wolfe", start="sinkhorn", starts=3)
    assert [one.start for one in found.tries] == ["sinkhorn"] * 3
    assert found.objective == max(one.objective for one in found.tries)
    assert found.bound == match(a, b, known).bound


@pytest.mark.parametrize("options", [{"tries": 0}, {"start": "nowhere"}])
def test_wrong_tries_and_starts(options: dict[str, Any]) -> None:
    module, known = mlp(3, 4, 2)
    state = trained_like(module, 0)
    with pytest.raises(InputError):
        match(state, state, known, **options)


def test_units_that_nothing_determines_stay() -> None:
    """Weights that are all zero leave every order as good as any other."""
    module, known = mlp(3, 4, 2)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    assert np.array_equal(match(nothing, nothing, known).permutations["h1"], np.arange(4))
