"""Weight similarity and streamed CKA, against the kernel definition."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from merganser.analysis import similarity as sim
from merganser.errors import InputError


def kernel_cka(x, y):
    n = len(x)
    h = np.eye(n) - np.ones((n, n)) / n
    k, l_ = x @ x.T, y @ y.T

    def hsic(a, b):
        return np.trace(a @ h @ b @ h) / (n - 1) ** 2

    return hsic(k, l_) / np.sqrt(hsic(k, k) * hsic(l_, l_))


@given(
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    offset=st.sampled_from([0.0, 1e3]),
)
@settings(max_examples=40, deadline=None)
def test_streamed_cka_is_the_kernel_definition(seed, sizes, offset):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x, y = rng.normal(size=(n, 4)) + offset, rng.normal(size=(n, 6)) @ rng.normal(size=(6, 6))
    y[:, :4] += x - offset
    stream = sim.LinearCKA()
    for part in np.split(np.arange(n), np.cumsum(sizes)[:-1]):
        stream.update([torch.from_numpy(x[part]), torch.from_numpy(y[part])])
    assert stream.cka()[0, 1] == pytest.approx(kernel_cka(x - offset, y), rel=1e-6)
    assert stream.cka()[0, 0] == pytest.approx(1)
    assert np.isnan(stream.distance()[0, 1])


def test_cka_memory_does_not_grow_with_samples():
    stream = sim.LinearCKA()
    for _ in range(5):
        stream.update([torch.randn(50, 3), torch.randn(50, 2)])
    held = sum(v.numel() for v in vars(stream).values() if isinstance(v, torch.Tensor))
    assert held == 5 * 5 + 2 * 5
    assert stream.samples == 250


def test_constant_representation_has_no_cka():
    stream = sim.LinearCKA()
    stream.update([torch.ones(4, 2), torch.randn(4, 2)])
    assert np.isnan(stream.cka()[0, 1])
    with pytest.raises(InputError, match="widths"):
        stream.update([torch.ones(4, 3), torch.randn(4, 2)])


def permuted(state, order):
    return {
        "0.weight": state["0.weight"][order],
        "0.bias": state["0.bias"][order],
        "2.weight": state["2.weight"][:, order],
        "2.bias": state["2.bias"],
    }


def test_before_and_after_alignment():
    """A permuted copy: CKA is one either way, distance and weight cosine see the permutation."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    state = {k: v.clone() for k, v in module.state_dict().items()}
    order = torch.randperm(9)
    scrambled = permuted(state, order)
    aligned = permuted(scrambled, torch.argsort(order))
    inputs = [torch.randn(n, 4) for n in (16, 5)]

    def representations(other):
        return sim.representation_similarity(module, {"a": state, "b": other}, inputs, "1")

    before, after = representations(scrambled), representations(aligned)
    assert before.samples == 21
    assert before.cka[0][1] == pytest.approx(1)
    x = torch.relu(torch.cat(inputs) @ state["0.weight"].T + state["0.bias"]).numpy()
    rms = np.sqrt(((x - x[:, order.numpy()]) ** 2).sum(1).mean())
    assert before.distance[0][1] == pytest.approx(rms, rel=1e-5)
    assert after.distance[0][1] == pytest.approx(0, abs=1e-5)
    summary = sim.before_after(before, after)
    assert summary.after["distance"] < summary.before["distance"]
    weights = sim.before_after(
        sim.weight_similarity({"a": state, "b": scrambled}), sim.weight_similarity({"a": state, "b": aligned})
    )
    assert weights.before["cosine"] < weights.after["cosine"] == pytest.approx(1)
    json.dumps(weights.to_dict(), allow_nan=False)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert not any(m._forward_hooks for m in module.modules())


def test_mistakes():
    module = nn.Sequential(nn.Linear(4, 9), nn.ReLU())
    state = module.state_dict()
    with pytest.raises(InputError, match="no submodule"):
        sim.representation_similarity(module, {"a": state}, [torch.randn(2, 4)], "7")
    with pytest.raises(InputError, match="at least one batch"):
        sim.representation_similarity(module, {"a": state}, [], "1")
    one, other = sim.weight_similarity({"a": state}), sim.weight_similarity({"b": state})
    with pytest.raises(InputError, match="same measure"):
        sim.before_after(one, other)


def test_one_small_difference_in_many_weights_is_seen():
    generator = torch.Generator().manual_seed(0)
    far, near = {"w": torch.zeros(500, 700)}, {"w": torch.randn(500, 700, generator=generator)}
    moved = {"w": near["w"].clone()}
    moved["w"][3, 4] += 1e-6
    found = sim.weight_similarity({"far": far, "near": near, "moved": moved}).distance
    expected = float((near["w"].double() - moved["w"].double()).norm())
    assert found[1][2] == pytest.approx(expected, rel=1e-12)
    assert found[1][1] == 0


def test_weights_that_are_no_numbers_have_no_similarity():
    sound, broken = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, float("nan"), 1.0])}
    endless = {"w": torch.tensor([1.0, float("inf"), float("-inf")])}
    found = sim.weight_similarity({"sound": sound, "broken": broken, "endless": endless, "zero": {"w": torch.zeros(3)}})
    assert np.isnan([found.cosine[0][1], found.cosine[0][2], found.cosine[1][1], found.cosine[1][2]]).all()
    assert found.cosine[0][3] == 0
    assert np.isnan(found.distance[0][1])
    assert found.distance[0][3] == pytest.approx(3**0.5)


def test_a_layer_is_measured_before_the_next_one_changes_its_output_in_place():
    def network(inplace):
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace), nn.Linear(6, 2))

    states = {name: network(False).state_dict() for name in "ab"}
    x = torch.randn(20, 4)
    plain, changed = (sim.representation_similarity(network(inplace), states, [x], "0") for inplace in (False, True))
    assert plain == changed


def test_no_models_to_compare():
    with pytest.raises(InputError, match="no models"):
        sim.weight_similarity({})
    with pytest.raises(InputError, match="no models"):
        sim.representation_similarity(nn.Sequential(nn.Linear(2, 2)), {}, [torch.randn(3, 2)], "0")
