"""Which models to merge, transport of task vectors, ensembles from the universe."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from align_networks import mlp, noisy_copies, resnet, trained_like

from merganser.align.ensembles import ensemble, sample_weights
from merganser.align.matching import match
from merganser.align.permutations import apply, inverse
from merganser.align.subsets import compare_subsets, merge_in_order, merging_order, quality_matrix
from merganser.align.transports import transport
from merganser.align.universes import universe
from merganser.errors import InputError


@pytest.fixture(scope="module")
def family():
    """Three noisy copies of one network and a stranger, in that order but for the stranger at place 1."""
    module, symmetry = mlp(8, 16, 12, 4)
    copies, planted = noisy_copies(trained_like(module, 0), symmetry, 3, noise=0.3, seed=0)
    copies.insert(1, trained_like(module, 9))
    return module, symmetry, copies, planted


def test_a_stranger_is_seen_in_the_quality_matrix_and_comes_last(family):
    _, symmetry, models, _ = family
    quality = quality_matrix(models, symmetry)
    np.testing.assert_allclose(quality, quality.T)
    np.testing.assert_allclose(np.diag(quality), 1.0)
    assert quality[1, [0, 2, 3]].max() < quality[np.ix_([0, 2, 3], [0, 2, 3])].min()
    assert merging_order(quality)[-1] == 1
    joint = quality_matrix(universe(models, symmetry))
    assert joint[1, [0, 2, 3]].max() < joint[0, 2]


def test_quality_by_score_is_the_score_of_the_midpoint(family):
    _, symmetry, models, _ = family
    seen = []

    def score(state):
        seen.append(state)
        return float(state["0.bias"].sum())

    quality = quality_matrix(models[:2], symmetry, score=score, method="frank_wolfe")
    assert quality[0, 0] == pytest.approx(float(models[0]["0.bias"].sum()))
    assert len(seen) == 3


def test_merging_order_by_hand():
    quality = np.array([[1, 0.2, 0.3, 0.9], [0.2, 1, 0.8, 0.1], [0.3, 0.8, 1, 0.2], [0.9, 0.1, 0.2, 1]])
    assert merging_order(quality) == [0, 3, 2, 1]
    with pytest.raises(InputError, match="square"):
        merging_order(np.ones((2, 3)))


def test_joint_against_separate_matching(family):
    _, symmetry, models, _ = family
    joint = universe(models, symmetry)
    rows = compare_subsets(joint, size=2, score=lambda state: -float(state["0.weight"].norm()))
    assert [row.members for row in rows] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    by_members = {row.members: row for row in rows}
    assert by_members[0, 2].separate_objective == pytest.approx(by_members[0, 2].joint_objective, rel=1e-5)
    assert all(row.joint_score is not None for row in rows)
    [chosen] = compare_subsets(joint, subsets=[(0, 2, 3)])
    assert chosen.joint_objective == pytest.approx(joint.subset([0, 2, 3]).objective)
    assert chosen.joint_score is None
    with pytest.raises(InputError, match="either"):
        compare_subsets(joint)
    with pytest.raises(InputError, match="symmetry"):
        quality_matrix(models)


def test_a_task_vector_travels_to_a_scrambled_base():
    """The target is the source, scrambled: the transported model must be the fine-tuned one, scrambled alike."""
    module, symmetry = resnet(6, "batch")
    source = trained_like(module, 0)
    [target], [planted] = noisy_copies(source, symmetry, 1, noise=0.0, seed=3)
    tuned = {
        n: t + 0.05 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1))
        if t.is_floating_point()
        else t + 5
        for n, t in source.items()
    }
    moved = transport(tuned, source, target, symmetry)
    for name, tensor in apply(symmetry, planted, tuned).items():
        if tensor.is_floating_point():
            torch.testing.assert_close(moved[name], tensor)
        else:
            assert torch.equal(moved[name], target[name])
    half = transport(tuned, source, target, symmetry, scale=0.5, alignment=planted)
    back = apply(symmetry, inverse(symmetry, planted), half)
    torch.testing.assert_close(back["a1.weight"], (source["a1.weight"] + tuned["a1.weight"]) / 2)


def test_the_ensemble_averages_predictions_of_sampled_merges(family):
    module, symmetry, models, _ = family
    found = universe(models, symmetry)
    inputs = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    together = ensemble(module, found, samples=3, seed=2)
    weights = sample_weights(4, 3, seed=2)
    np.testing.assert_allclose(weights.sum(1), 1.0)
    expected = []
    for row in weights:
        one = copy.deepcopy(module)
        one.load_state_dict(found.merged(list(row)))
        expected.append(one(inputs).softmax(-1))
    torch.testing.assert_close(together(inputs), torch.stack(expected).mean(0))
    prepared = []
    ensemble(module, found, samples=2, prepare=lambda m: prepared.append(m) or m)
    assert len(prepared) == 2
    with pytest.raises(InputError, match="prepare must return the model to evaluate"):
        ensemble(module, found, samples=2, prepare=lambda m: None)
    with pytest.raises(InputError, match="samples"):
        sample_weights(3, 0)


def test_sampled_merges_are_repaired_by_their_weights(family):
    module, symmetry, models, _ = family
    found = universe(models, symmetry)
    inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    (member,) = ensemble(module, found, samples=1, seed=2, batches=[inputs]).members
    weights = sample_weights(4, 1, seed=2)[0].tolist()

    def hidden(state):
        one = copy.deepcopy(module)
        one.load_state_dict(state)
        return one[0](inputs)

    wanted = sum(w * hidden(found.to_universe(i)).std(0, correction=0) for i, w in enumerate(weights))
    torch.testing.assert_close(hidden(member.state_dict()).std(0, correction=0), wanted)


def test_merging_in_order_matches_each_model_to_the_mean_of_those_before():
    states, symmetry = [trained_like(mlp(6, 12, 10, 3)[0], seed) for seed in range(4)], mlp(6, 12, 10, 3)[1]
    order = [2, 0, 3, 1]
    found = merge_in_order(states, symmetry, order)
    mean = states[2]
    for taken, model in enumerate(order[1:], 1):
        moved = match(mean, states[model], symmetry).apply(states[model])
        assert all(torch.equal(tensor, found.to_universe(model)[name]) for name, tensor in moved.items())
        mean = {name: (taken * tensor + moved[name]) / (taken + 1) for name, tensor in mean.items()}
    for name, tensor in found.merged().items():
        torch.testing.assert_close(tensor, mean[name])
    chosen = merge_in_order(states, symmetry)
    assert chosen.permutations[merging_order(quality_matrix(states, symmetry))[0]]["h1"].tolist() == list(range(12))
    with pytest.raises(InputError, match="names each of 0 … 3 once"):
        merge_in_order(states, symmetry, [0, 1, 1, 2])


@pytest.mark.parametrize("size", [0, 1, 4])
def test_subsets_of_a_size_that_there_is_not_are_refused(size):
    module, free = mlp(3, 5, 2)
    joint = universe([trained_like(module, seed) for seed in range(3)], free)
    with pytest.raises(InputError, match=f"2 to 3 of them, got size={size}"):
        compare_subsets(joint, size=size)
