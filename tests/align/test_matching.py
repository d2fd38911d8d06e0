"""Pairwise matching by every method."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from align_networks import attention, mlp, noisy_copies, resnet, trained_like, vgg
from torch.nn import functional as F

from merganser.align.matching import METHODS, match
from merganser.align.permutations import compose, inverse, random
from merganser.errors import InputError

NETWORKS = {
    "mlp": (lambda: mlp(10, 24, 20, 16, 4), (64, 10)),
    "resnet-batchnorm": (lambda: resnet(8, "batch"), (16, 3, 8, 8)),
    "resnet-layernorm": (lambda: resnet(8, "layer"), (16, 3, 8, 8)),
    "vgg": (lambda: vgg(8), (16, 3, 8, 8)),
    "attention": (lambda: attention(24, 4), (16, 5, 6)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    make, shape = NETWORKS[request.param]
    module, symmetry = make()
    return module, symmetry, shape


def loaded(module, state):
    module = copy.deepcopy(module)
    module.load_state_dict(state)
    return module


def batches_of(shape, count=4):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator), torch.zeros(shape[0])) for _ in range(count)]


def options_for(method, shape):
    if method == "activations":
        return {"batches": [inputs for inputs, _ in batches_of(shape)]}
    if method == "ste":
        return {"batches": batches_of(shape, 2), "loss": lambda outputs, _: outputs.square().mean(), "epochs": 1}
    return {}


@pytest.mark.parametrize("method", METHODS)
def test_planted_permutations_are_recovered_exactly(network, method):
    """One scrambled copy against another, noise 10 % of each tensor's spread, seed 5."""
    module, symmetry, shape = network
    (a, b), (left, right) = noisy_copies(trained_like(module, 0), symmetry, 2, noise=0.1, seed=5)
    found = match(loaded(module, a), loaded(module, b), symmetry, method, **options_for(method, shape))
    expected = compose(symmetry, inverse(symmetry, right), left)
    for name, index in found.permutations.items():
        np.testing.assert_array_equal(index, expected[name])
    mapped = found.apply(b)
    inner = sum(float((a[n].double() * mapped[n].double()).sum()) for n in symmetry.objective)
    assert found.objective == pytest.approx(inner, rel=1e-5)


@pytest.mark.parametrize("standardize", [False, True])
def test_activation_matching_streams(standardize):
    """Small batches and one big one give the same match; the models keep their mode and their weights."""
    module, symmetry = resnet(8, "batch")
    a, b = (loaded(module, trained_like(module, seed)).train() for seed in (0, 1))
    before = copy.deepcopy(a.state_dict())
    [(inputs, _)] = batches_of((32, 3, 8, 8), 1)
    whole = match(a, b, symmetry, "activations", batches=[inputs], standardize=standardize)
    parts = match(a, b, symmetry, "activations", batches=list(inputs.split(8)), standardize=standardize)
    for name, index in whole.permutations.items():
        np.testing.assert_array_equal(index, parts.permutations[name])
    assert a.training
    assert all(torch.equal(before[n], t) for n, t in a.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"standardize": False}])
def test_activation_matching_is_the_assignment_of_correlations_or_moments(options):
    from scipy.optimize import linear_sum_assignment

    module, symmetry = mlp(6, 12, 3)
    a, b = (loaded(module, trained_like(module, seed)) for seed in (0, 1))
    [(inputs, _)] = batches_of((50, 6), 1)
    with torch.no_grad():
        for layer, scale in ((a[0], 3.0), (b[0], 0.1)):  # so that correlations and moments differ in the match
            layer.weight[:4] *= scale
            layer.bias[4:] += 2.0
        left, right = a[0](inputs).double().numpy(), b[0](inputs).double().numpy()
    found = match(a, b, symmetry, "activations", batches=iter([inputs]), **options)
    moments, correlations = left.T @ right, np.corrcoef(left.T, right.T)[:12, 12:]
    assert len({tuple(linear_sum_assignment(c, maximize=True)[1]) for c in (moments, correlations)}) == 2
    cross = moments if options else correlations
    np.testing.assert_array_equal(found.permutations["h1"], linear_sum_assignment(cross, maximize=True)[1])


@pytest.mark.parametrize("method", ["weights", "frank_wolfe"])
def test_objective_rises_and_runs_repeat(network, method):
    module, symmetry, _ = network
    a, b = trained_like(module, 1), trained_like(module, 2)
    first, second = (match(a, b, symmetry, method, seed=4) for _ in range(2))
    assert all(np.array_equal(p, second.permutations[n]) for n, p in first.permutations.items())
    for before, after in pairwise(first.trace):
        if before.run == after.run:
            assert after.objective >= before.objective - 1e-5 * abs(before.objective)
    assert first.objective >= first.trace[0].objective


def test_the_seed_orders_weight_matching_and_starts_are_kept():
    module, symmetry = mlp(8, 20, 20, 20, 4)
    a, b = trained_like(module, 1), trained_like(module, 2)
    objectives = {round(match(a, b, symmetry, "weights", seed=seed).objective, 6) for seed in range(8)}
    assert len(objectives) > 1
    start = random(symmetry, 0)
    again = match(a, b, symmetry, "frank_wolfe", start=start)
    warm = match(a, b, symmetry, "weights", start=again.permutations)
    assert warm.objective >= again.objective * (1 - 1e-6)
    many = match(a, b, symmetry, "frank_wolfe", start="sinkhorn", starts=3)
    assert many.objective >= match(a, b, symmetry, "frank_wolfe", start="sinkhorn").objective


def test_straight_through_lowers_the_loss_of_the_midpoint():
    """Two small classifiers of one task from different seeds (6 and 7)."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 8, generator=generator)
    labels = (inputs[:, :4].abs().sum(1) > inputs[:, 4:].abs().sum(1)).long()
    modules = []
    for seed in (6, 7):
        torch.manual_seed(seed)
        module, symmetry = mlp(8, 12, 2)
        optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(150):
            optimiser.zero_grad()
            F.cross_entropy(module(inputs), labels).backward()
            optimiser.step()
        modules.append(module)
    batches = [(inputs[i : i + 64], labels[i : i + 64]) for i in range(0, 256, 64)]
    states = [copy.deepcopy(m.state_dict()) for m in modules]
    found = match(
        *modules,
        symmetry,
        "ste",
        batches=batches,
        loss=F.cross_entropy,
        epochs=6,
        learning_rate=0.03,
    )
    losses = [step.loss for step in found.trace]
    assert len(losses) == 7
    assert min(losses) < losses[0]
    assert all(torch.equal(s[n], t) for s, m in zip(states, modules, strict=True) for n, t in m.state_dict().items())


def test_wrong_requests_say_what_is_wrong():
    module, symmetry = mlp(5, 8, 3)
    state = trained_like(module, 0)
    with pytest.raises(InputError, match="did you mean 'weights'"):
        match(state, state, symmetry, "weight")
    with pytest.raises(InputError, match="has no option 'batches'"):
        match(state, state, symmetry, "weights", batches=[])
    with pytest.raises(InputError, match="give modules"):
        match(state, state, symmetry, "activations", batches=[])
    with pytest.raises(InputError, match="no batch"):
        match(module, module, symmetry, "activations", batches=[])
    with pytest.raises(InputError, match="at least one module"):
        match(state, state, symmetry, "ste", batches=[], loss=F.mse_loss)
