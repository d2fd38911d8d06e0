"""The universe by activations, against its objective by the definition and against planted permutations."""

from __future__ import annotations

import copy
from itertools import combinations

import numpy as np
import pytest
import torch
from align_networks import mlp, trained_like
from scipy.optimize import linear_sum_assignment
from torch import nn

from merganser.align import match, scramble, symmetry, universe
from merganser.align.cross_moments import cross_moments, unit_grams
from merganser.align.initialisation import hard_placing
from merganser.align.permutations import random
from merganser.align.placements import HardImage, Placement
from merganser.errors import InputError


def networks(count: int, *sizes: int) -> list[nn.Module]:
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(mlp(*sizes)[0])
    return found


def hidden(network: nn.Module, inputs: torch.Tensor, layer: int) -> np.ndarray:
    """Responses of the units of a layer before its activation function, standardised: (samples, units)."""
    with torch.no_grad():
        z = network[: layer + 1](inputs).double().numpy()
    return (z - z.mean(0)) / z.std(0)


def summed_agreement(nets: list[nn.Module], inputs: torch.Tensor, permutations: list[dict]) -> float:
    """Σ_{p<q} Σ_layers ⟨Z_p P_p, Z_q P_q⟩ by the definition."""
    total = 0.0
    for layer, atom in ((0, "h1"), (2, "h2")):
        moved = [hidden(net, inputs, layer)[:, p[atom]] for net, p in zip(nets, permutations, strict=True)]
        total += sum(float((a * b).sum()) for a, b in combinations(moved, 2))
    return total


def test_the_objective_is_the_sum_over_pairs() -> None:
    nets, (_, symmetry) = networks(3, 5, 8, 7, 3), mlp(5, 8, 7, 3)
    inputs = torch.randn(40, 5)
    layout, weights = cross_moments(nets, symmetry, inputs.split(9), standardize=True).factors()
    permutations = [random(symmetry, seed) for seed in range(3)]
    images = [HardImage(layout, w, hard_placing(layout, p)) for w, p in zip(weights, permutations, strict=True)]
    expected = summed_agreement(nets, inputs, permutations)
    assert Placement(layout, images).objective() == pytest.approx(expected, rel=1e-4)


def test_two_models_reach_the_assignment_of_their_correlations() -> None:
    nets, (_, symmetry) = networks(2, 5, 8, 7, 3), mlp(5, 8, 7, 3)
    inputs = torch.randn(60, 5)
    found = universe(nets, symmetry, batches=[inputs])
    best = 0.0
    for layer in (0, 2):
        correlations = hidden(nets[0], inputs, layer).T @ hidden(nets[1], inputs, layer)
        rows, columns = linear_sum_assignment(correlations, maximize=True)
        best += correlations[rows, columns].sum()
    assert summed_agreement(nets, inputs, found.permutations) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("standardize", [True, False])
def test_scrambled_copies_come_back_together(standardize: bool) -> None:
    [net], (_, symmetry) = networks(1, 6, 20, 16, 4), mlp(6, 20, 16, 4)
    copies = [scramble(net, symmetry, seed) for seed in range(4)]
    found = universe(copies, symmetry, batches=list(torch.randn(64, 6).split(16)), standardize=standardize)
    first = found.to_universe(0)
    for model in range(1, 4):
        assert all(torch.equal(first[name], tensor) for name, tensor in found.to_universe(model).items())
    assert found.cycle_error() == 0.0


def test_it_agrees_more_than_pairwise_matches_to_the_first() -> None:
    nets, (_, symmetry) = networks(4, 6, 24, 24, 4), mlp(6, 24, 24, 4)
    inputs = torch.randn(200, 6)
    joint = universe(nets, symmetry, batches=[inputs]).permutations
    still = {name: np.arange(24) for name in ("h1", "h2")}
    options = {"batches": [inputs], "standardize": True}
    star = [still, *(match(nets[0], net, symmetry, "activations", **options).permutations for net in nets[1:])]
    assert summed_agreement(nets, inputs, joint) > summed_agreement(nets, inputs, star)


def test_dead_units_and_few_samples_do_no_harm() -> None:
    """G is singular; what the Cholesky factor needs on its diagonal is in no pair of models."""
    nets, (_, symmetry) = networks(3, 5, 12, 3), mlp(5, 12, 3)
    with torch.no_grad():
        for net in nets:
            net[0].weight[:4] = 0.0
    inputs = torch.randn(6, 5)
    before = copy.deepcopy(nets[0].state_dict())
    found = universe(nets, symmetry, batches=[inputs])
    assert len(found) == 3
    assert all(torch.equal(before[name], tensor) for name, tensor in nets[0].state_dict().items())


def test_weights_cannot_be_run() -> None:
    nets, (_, symmetry) = networks(2, 5, 8, 3), mlp(5, 8, 3)
    with pytest.raises(InputError, match="runs the models: give modules"):
        universe([net.state_dict() for net in nets], symmetry, batches=[torch.randn(4, 5)])
    with pytest.raises(InputError, match="no batch was seen"):
        universe(nets, symmetry, batches=[])


def test_activations_are_those_before_a_layer_that_changes_them_in_place():
    def network(inplace):
        made = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 3))
        made.load_state_dict(trained_like(made, 1))
        return made

    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    free = symmetry(network(False), x)
    plain, changed = (unit_grams([network(inplace)], [free], [x])["0",] for inplace in (False, True))
    assert torch.equal(plain, changed)
