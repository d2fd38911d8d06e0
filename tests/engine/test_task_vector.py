"""The algebra of task vectors: laws, streaming against eager arithmetic, and what is written to disk."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import merganser as mg
from merganser.checkpoints.base import Checkpoint
from merganser.checkpoints.memory import StateDict
from merganser.errors import CheckpointError, InputError
from support.plans import random_models

NAMES = ("big", "cube", "row", "bias", "scalar", "empty")
BASE, A, B, C = random_models(3)


def vector(model):
    return mg.TaskVector(model, BASE)


def eager(model):
    return {name: model[name] - BASE[name] for name in NAMES}


def close(tv, expected, tolerance=1e-6):
    assert set(tv.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.allclose(tv.read(name), tensor, atol=tolerance, rtol=0), name


class Watched(StateDict):
    """Counts what is read of it."""

    reads = 0

    def read(self, name, rows=None):
        type(self).reads += 1
        return super().read(name, rows)


def test_nothing_is_read_before_it_is_asked_for():
    Watched.reads = 0
    a, b = mg.TaskVector(Watched(A), Watched(BASE)), mg.TaskVector(Watched(B), Watched(BASE))
    made = (0.4 * (a + b) - a / 3).only("b*").top(0.5, by=b).agreeing(a).low_rank(2).masked(lambda n, t: t > 0)
    made.apply_to(Watched(BASE))
    assert Watched.reads == 0
    made.read("bias")
    assert Watched.reads > 0


coefficients = st.floats(-3, 3, allow_nan=False)


@given(coefficients, coefficients, coefficients)
def test_expressions_equal_eager_arithmetic(x, y, z):
    a, b, c = vector(A), vector(B), vector(C)
    made = x * (a + b * y) - c / (1 + abs(z))
    ea, eb, ec = eager(A), eager(B), eager(C)
    close(made, {n: x * (ea[n] + y * eb[n]) - ec[n] / (1 + abs(z)) for n in NAMES}, 1e-5)


@given(coefficients, st.permutations([0, 1, 2]))
def test_laws(x, order):
    vectors = [vector(m) for m in (A, B, C)]
    a, b, c = vectors
    close(sum(vectors[i] for i in order), (a + b + c).state_dict())
    close(x * (a + b), (x * a + x * b).state_dict(), 1e-5)
    close(a - b + c, {n: eager(A)[n] - eager(B)[n] + eager(C)[n] for n in NAMES})  # analogy
    for name in NAMES:
        assert torch.equal((a + b - b).read(name), a.read(name))
        assert torch.equal((-1 * (-a)).read(name), a.read(name))
        assert not (a - a).read(name).any()
        assert torch.equal((a + b).read(name), (b + a).read(name))


@given(st.integers(0, 699), st.integers(0, 699))
def test_rows_are_the_same_bits_as_the_whole(first, last):
    first, last = sorted((first, last))
    a, b = vector(A), vector(B)
    for made in ((0.3 * a - b), a.top(0.1), a.top(0.3, by=b), a.agreeing(b), a.masked(lambda n, t: t > 0.1)):
        assert torch.equal(made.read("big", (first, last)), made.read("big")[first:last])


def test_masks():
    a, b = vector(A), vector(B)
    ea, eb = eager(A), eager(B)
    close(a.agreeing(b), {n: torch.where(ea[n].sign() == eb[n].sign(), ea[n], 0.0) for n in NAMES})
    close(a.masked(lambda name, t: t.abs() > 0.1), {n: torch.where(ea[n].abs() > 0.1, ea[n], 0.0) for n in NAMES})
    close(a.masked(b.top(0.2)), a.top(0.2, by=b).state_dict())
    for density in (0.0, 0.013, 0.2, 1.0):
        for name in NAMES:
            n = ea[name].numel()
            keep = min(n, max(1, int(density * n))) if density else 0
            flat = ea[name].abs().flatten()
            chosen = torch.sort(flat, descending=True, stable=True).indices[:keep]
            expected = torch.zeros_like(flat)
            expected[chosen] = ea[name].flatten()[chosen]
            assert torch.equal(a.top(density).read(name).flatten(), expected), (density, name)
    ones = mg.TaskVector.load({"w": torch.ones(10)})
    assert ones.top(0.3).read("w").tolist() == [1] * 3 + [0] * 7
    with pytest.raises(InputError, match="density"):
        a.top(1.5)
    with pytest.raises(InputError, match="mask of 'big' has shape"):
        a.masked(lambda name, t: torch.ones(2)).read("big")


def test_low_rank_is_the_best_approximation():
    a = vector(A)
    for name, rank in (("big", 5), ("cube", 2)):
        u, s, vh = np.linalg.svd(eager(A)[name].double().flatten(1).numpy(), full_matrices=False)
        expected = torch.from_numpy((u[:, :rank] * s[:rank]) @ vh[:rank]).float().view(A[name].shape)
        assert torch.allclose(a.low_rank(rank).read(name), expected, atol=1e-5)
        assert torch.allclose(a.low_rank(rank).read(name, (1, 3)), expected[1:3], atol=1e-5)
    assert torch.equal(a.low_rank(1).read("bias"), a.read("bias"))
    assert torch.allclose(a.low_rank(10**6).read("big"), eager(A)["big"], atol=1e-5)
    assert torch.linalg.matrix_rank(a.low_rank(0.01).read("big").double(), rtol=1e-5) == 7
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="rank"):
            a.low_rank(bad)


def test_restriction_and_union():
    a, b = vector(A), vector(B)
    assert set(a.only("b*").names()) == {"big", "bias"}
    assert set(a.without("b*", "empty").names()) == {"cube", "row", "scalar"}
    both = a.only("bias") + b.only("row")
    close(both, {"bias": eager(A)["bias"], "row": eager(B)["row"]})
    with pytest.raises(InputError, match="leaves no tensor"):
        a.only("nothing*")


def test_geometry_against_numpy():
    a, b = vector(A), vector(B)
    x, y = (np.concatenate([eager(m)[n].double().numpy().ravel() for n in NAMES]) for m in (A, B))
    assert a.norm() == pytest.approx(np.linalg.norm(x), rel=1e-12)
    assert a.dot(b) == pytest.approx(x @ y, rel=1e-12, abs=1e-9)
    assert a.cosine(b) == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-10, abs=1e-13)
    assert a.cosine(a) == 1.0
    assert (-a).cosine(a) == -1.0
    assert (a - a).cosine(a) == 0.0
    assert a.sign_agreement(b) == pytest.approx(((x * y) > 0).sum() / ((x * y) != 0).sum())
    assert math.isnan((a - a).sign_agreement(a))
    assert math.hypot(*a.norms().values()) == pytest.approx(a.norm())


def test_a_function_is_fingerprinted_by_what_it_keeps():
    def large(threshold):
        return vector(A).masked(lambda name, tensor: tensor.abs() > threshold)

    assert large(0.1).fingerprint() == large(0.1).fingerprint()
    assert large(0.1).fingerprint() != large(0.2).fingerprint()


def test_numbers_that_labels_round_are_fingerprinted():
    a = vector(A)
    for made in (lambda x: x * a, lambda x: a.top(x), lambda x: a.low_rank(x)):
        assert made(0.1234567).label == made(0.12345671).label
        assert made(0.1234567).fingerprint() != made(0.12345671).fingerprint()


def test_vectors_that_are_not_finite_have_no_angle():
    flat = torch.tensor([math.inf, -math.inf, 1.0])
    a = mg.TaskVector.load({"x": flat})
    b = mg.TaskVector.load({"x": torch.ones(3)})
    assert math.isnan(a.cosine(b))
    assert math.isnan(a.cosine(a))
    assert math.isnan(a.dot(b))
    assert a.norm() == math.inf


def test_geometry_does_not_depend_on_threads_or_the_order_of_tensors():
    a, b = vector(A), vector(B)
    turned = [mg.TaskVector(dict(reversed(m.items())), dict(reversed(BASE.items()))) for m in (A, B)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert (a.norm(), a.dot(b)) == (turned[0].norm(), turned[0].dot(turned[1]))
        threaded = a.dot(b)
        torch.set_num_threads(1)
        assert a.dot(b) == threaded
    finally:
        torch.set_num_threads(before)


@given(st.floats(-2, 2, allow_nan=False))
def test_applied_equals_eager(scale):
    made = (0.5 * (vector(A) + vector(B))).apply_to(BASE, scale)
    for name in NAMES:
        expected = BASE[name] + scale * (0.5 * (eager(A)[name] + eager(B)[name]))
        assert torch.allclose(made.read(name), expected, atol=1e-6)
    assert torch.equal(made.read("steps"), BASE["steps"])
    assert list(made.names()) == list(BASE)


def test_an_opened_base_begins_an_expression():
    base = mg.open(BASE)
    made = base + 0.4 * (vector(A) + vector(B)) - vector(C)
    same = (0.4 * (vector(A) + vector(B)) - vector(C)).apply_to(BASE)
    for name in NAMES:
        assert torch.allclose(made.read(name), same.read(name), atol=1e-6)
        assert torch.equal((base - vector(A)).read(name), (-vector(A)).apply_to(BASE).read(name))
        further = vector(A).apply_to(BASE, 0.5) + vector(A)
        assert torch.allclose(further.read(name), A[name] + 0.5 * eager(A)[name], atol=1e-6)
    assert made.source is base
    for wrong in (lambda: vector(A) + base, lambda: base + 1 * vector(A) + 1, lambda: "base" - vector(A)):
        with pytest.raises(TypeError):
            wrong()


def test_applying_agrees_with_the_method():
    merged = mg.merge([A, B], method="task_arithmetic", base=BASE, weight=[0.4, -0.7])
    made = (0.4 * vector(A) - 0.7 * vector(B)).apply_to(BASE)
    for name, tensor in merged.items():
        assert torch.allclose(made.read(name), tensor, atol=1e-6)


def test_saved_and_loaded(checkpoint, tmp_path):
    paths = [str(checkpoint(f"m{i}", m, '{"model_type": "x"}')) for i, m in enumerate((BASE, A, B))]
    a, b = (mg.TaskVector(path, paths[0]) for path in paths[1:])
    made = 0.4 * (a + b)
    out = mg.save(made, tmp_path / "vector")
    loaded = mg.TaskVector.load(out)
    for name in NAMES:
        assert torch.equal(loaded.read(name), made.read(name))
    assert not (out / "config.json").exists()
    model = mg.save(made.apply_to(paths[0]), tmp_path / "model")
    assert json.loads((model / "config.json").read_text()) == {"model_type": "x"}
    again = loaded.apply_to(paths[0])
    for name in BASE:
        assert torch.equal(mg.open(model).read(name), again.read(name))
    half = mg.save(made, tmp_path / "half", dtype=torch.bfloat16)
    assert torch.equal(mg.open(half).read("bias"), made.read("bias").bfloat16())


def test_bfloat16_and_float64_sources():
    low = [{n: t.bfloat16() if t.is_floating_point() else t for n, t in m.items()} for m in (A, BASE)]
    tv = mg.TaskVector(*low)
    assert tv.read("big").dtype == torch.float32
    assert torch.equal(tv.read("big"), low[0]["big"].float() - low[1]["big"].float())
    high = [{n: t.double() if t.is_floating_point() else t for n, t in m.items()} for m in (A, BASE)]
    assert mg.TaskVector(*high).read("big").dtype == torch.float64
    assert (mg.TaskVector(*high) + tv).read("big").dtype == torch.float64


class Tied(StateDict):
    def names(self) -> Sequence[str]:
        return ["w"]

    def aliases(self):
        return {"head": "w"}


def test_what_does_not_fit_is_said():
    with pytest.raises(CheckpointError, match="has no 'bias'"):
        mg.TaskVector({k: v for k, v in A.items() if k != "bias"}, BASE)
    with pytest.raises(CheckpointError, match="'bias' is float32\\[3\\]"):
        mg.TaskVector(A | {"bias": torch.ones(3)}, BASE)
    with pytest.raises(CheckpointError, match="has 'head', which"):
        mg.TaskVector(A | {"head": torch.ones(3)}, BASE)
    assert "head" not in mg.TaskVector(A | {"head": torch.ones(3)}, BASE, exclude=("head",))
    with pytest.raises(CheckpointError, match="changes 'big'"):
        vector(A).apply_to({"bigg": BASE["big"]})
    tied: Checkpoint = Tied({"w": torch.ones(2), "head": torch.ones(2)})
    with pytest.raises(CheckpointError, match="ties"):
        mg.TaskVector.load({"w": torch.ones(2), "head": torch.ones(2)}).apply_to(tied)
    assert torch.equal(mg.TaskVector.load({"head": torch.ones(2)}).apply_to(tied).read("w"), 2 * torch.ones(2))
    with pytest.raises(InputError, match="zero"):
        vector(A) / 0
    with pytest.raises(InputError, match="inf"):
        vector(A) * math.inf
    for wrong in ("x", None, True, torch.ones(1), np.ones(2), torch.tensor(1j)):
        with pytest.raises(TypeError):
            vector(A) * wrong
        with pytest.raises(TypeError):
            vector(A) / wrong
    with pytest.raises(TypeError):
        vector(A) + 1


def test_numbers_of_numpy_are_numbers():
    for factor in np.linspace(0.5, 1.0, 2):
        kinds = (factor, np.float32(factor), np.float16(factor), np.array(factor), torch.tensor(factor))
        for number in (*kinds, torch.tensor(factor).bfloat16()):
            for scaled in (number * vector(A), vector(A) * number, vector(A) / (1 / number)):
                assert isinstance(scaled, mg.TaskVector)
                close(scaled, {name: float(number) * tensor for name, tensor in eager(A).items()}, 1e-2)
            assert (number * vector(A)).vector.settings == (float(number),)


def test_a_rank_is_a_number_and_a_float_up_to_one_a_share():
    tensors = {"w": torch.randn(8, 5, generator=torch.Generator().manual_seed(0))}
    whole = mg.TaskVector(tensors, {"w": torch.zeros(8, 5)})
    u, s, v = np.linalg.svd(tensors["w"].double().numpy(), full_matrices=False)
    for rank, kept in ((1, 1), (1.0, 5), (0.4, 2), (2.0, 2), (7, 5)):
        expected = (u[:, :kept] * s[:kept]) @ v[:kept]
        np.testing.assert_allclose(whole.low_rank(rank)["w"].numpy(), expected, atol=1e-5)
    for rank in (0, 0.0, -1, 1.5, True, "a", float("nan"), float("inf")):
        with pytest.raises(InputError, match="a rank is a whole number"):
            whole.low_rank(rank)
