"""TSV-Merge against a naive float64 version and its defining properties."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import merganser
from merganser.checkpoints.base import TensorSpec
from merganser.methods import tsv
from merganser.methods.base import Group
from merganser.methods.registry import build
from merganser.methods.tsv import TSV, decompose, orthogonal_sum


def naive_tsv(deltas, k):
    """The published algorithm, with numpy in float64."""
    parts = [np.linalg.svd(delta.astype(np.float64), full_matrices=False) for delta in deltas]
    u = np.concatenate([p[0][:, :k] for p in parts], axis=1)
    s = np.concatenate([p[1][:k] for p in parts])
    v = np.concatenate([p[2][:k] for p in parts], axis=0)
    pu, _, qu = np.linalg.svd(u, full_matrices=False)
    pv, _, qv = np.linalg.svd(v, full_matrices=False)
    return (pu @ qu * s) @ (pv @ qv)


def task_matrices(t, d, m, seed=0, decay=1.0, common=0.0):
    """Experts with a decaying spectrum; `common` is the weight of a part they share."""
    rng = np.random.default_rng(seed)

    def one():
        n = min(d, m)
        u, v = (np.linalg.qr(rng.standard_normal((size, n)))[0] for size in (d, m))
        return (u / np.arange(1, n + 1) ** decay) @ v.T

    shared = one()
    return [(one() + common * shared).astype(np.float32) for _ in range(t)]


def group_of(deltas, base=None, name="layer.weight"):
    base = torch.zeros(deltas[0].shape) if base is None else base
    models = tuple(base + torch.as_tensor(delta) for delta in deltas)
    return Group(name, models, base, tuple(f"m{i}" for i in range(len(models))), tuple(base.shape))


def merge(deltas, base=None, name="layer.weight", **parameters):
    group = group_of(deltas, base, name)
    return build(TSV, parameters, group.labels).merge(group)


def relative(found, wanted):
    return float(np.linalg.norm(np.asarray(found) - wanted) / np.linalg.norm(wanted))


@settings(max_examples=30, deadline=None)
@given(
    t=st.integers(1, 6),
    shape=st.sampled_from([(40, 40), (60, 24), (24, 60), (130, 70), (16, 9)]),
    common=st.floats(0, 0.5),
    seed=st.integers(0, 50),
)
def test_equals_the_published_algorithm(t, shape, common, seed):
    deltas = task_matrices(t, *shape, seed=seed, common=common)
    # One less than the whole space: at T·k = n the concatenated factors are nearly singular by construction.
    k = max(1, min(shape) // t - 1)
    found = merge(deltas, rank_fraction=(k + 0.5) / min(shape))
    assert relative(found, naive_tsv(deltas, k)) < 1e-5


def test_default_rank_is_one_share_of_the_whole():
    deltas = task_matrices(4, 96, 48, seed=1)
    assert relative(merge(deltas), naive_tsv(deltas, 12)) < 1e-5


def test_result_is_added_to_the_base_and_scaled():
    deltas, base = task_matrices(3, 20, 12), torch.randn(20, 12)
    whole = merge(deltas, base) - base
    np.testing.assert_allclose(merge(deltas, base, scale=0.5) - base, 0.5 * whole, atol=1e-6)
    assert torch.equal(merge(deltas, base, scale=0), base)


@pytest.mark.parametrize("t", [2, 3, 7])
@pytest.mark.parametrize("shape", [(20, 12), (60, 90)])
def test_identical_experts_return_the_truncated_expert(t, shape):
    (delta,) = task_matrices(1, *shape)
    k = max(1, min(shape) // t)
    u, s, vt = np.linalg.svd(delta.astype(np.float64), full_matrices=False)
    assert relative(merge([delta] * t), (u[:, :k] * s[:k]) @ vt[:k]) < 1e-6


@pytest.mark.parametrize("epsilon", [1e-7, 1e-6, 3e-6])
def test_near_duplicates_return_it_to_the_order_of_their_distance(epsilon):
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((size, 40)))[0] for size in (80, 40))
    s = np.r_[np.linspace(2, 1, 20), np.linspace(0.2, 0.1, 20)]  # a clear gap where the cut falls
    delta = (u * s) @ v.T
    noise = rng.standard_normal(delta.shape)
    other = delta + epsilon * noise / np.linalg.norm(noise, 2)
    base = torch.zeros(80, 40, dtype=torch.float64)
    found = merge([delta, other], base)
    assert relative(found, (u[:, :20] * s[:20]) @ v[:, :20].T) < 10 * epsilon


def test_nothing_jumps_between_duplicates_and_strangers():
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.standard_normal((30, 4)))[0] for _ in range(2))
    base = torch.zeros(30, 30, dtype=torch.float64)

    def merged(angle):
        tilt = np.cos(angle) * u[:, :1] + np.sin(angle) * u[:, 1:2]
        turn = np.cos(angle) * v[:, :1] + np.sin(angle) * v[:, 1:2]
        return merge([u[:, :1] @ v[:, :1].T, tilt @ turn.T], base, rank_fraction=1 / 30)

    path = [merged(angle) for angle in np.logspace(-6, 0.19, 300)]
    steps = [float((b - a).norm()) for a, b in itertools.pairwise(path)]
    assert max(steps) < 0.1


def test_orthogonal_experts_add_up():
    rng = np.random.default_rng(2)
    u, v = (np.linalg.qr(rng.standard_normal((size, 30)))[0] for size in (50, 30))
    blocks = [slice(0, 10), slice(10, 20), slice(20, 30)]
    deltas = [(u[:, b] * np.linspace(2, 1, 10)) @ v[:, b].T for b in blocks]
    base = torch.zeros(50, 30, dtype=torch.float64)
    np.testing.assert_allclose(merge(deltas, base), sum(deltas), atol=1e-10)


def test_experts_in_both_precisions_are_orthogonalised_in_float32(monkeypatch):
    """One expert that float32 cannot decompose does not make the merge of all of them several times slower."""
    draw = torch.Generator().manual_seed(0)
    factors = decompose([torch.randn(40, 40, generator=draw) for _ in range(3)], 10)
    wanted = orthogonal_sum(factors)
    narrow = [type(part)(*(each.float() for each in part)) for part in factors[:2]]
    seen = []
    real = tsv.inverse_root
    monkeypatch.setattr(tsv, "inverse_root", lambda side, *rest: seen.append(side.dtype) or real(side, *rest))
    found = orthogonal_sum([*narrow, factors[2]])
    assert seen == [torch.float32] * 2
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("t", [5, 40])
def test_more_tasks_than_directions_keeps_one_each(t):
    deltas = task_matrices(t, 6, 4)
    found = merge(deltas)
    assert torch.isfinite(found).all()
    assert float(found.norm()) > 0


def test_a_single_expert_is_itself():
    (delta,) = task_matrices(1, 30, 20)
    assert relative(merge([delta]), delta) < 1e-6


def test_zero_deltas_change_nothing():
    base = torch.randn(40, 36)
    assert torch.equal(merge([torch.zeros(40, 36)] * 3, base), base)
    (delta,) = task_matrices(1, 40, 36)
    alone = merge([delta, np.zeros_like(delta)], rank_fraction=1.0)
    assert relative(alone, delta) < 1e-6


@pytest.mark.parametrize("shape", [(7,), (), (1, 9), (4, 3, 2, 2)])
def test_everything_but_matrices_is_averaged(shape):
    deltas = [torch.randn(shape) for _ in range(3)]
    np.testing.assert_allclose(merge(deltas), sum(deltas) / 3, atol=1e-6)


def test_convolutions_may_be_matrices():
    deltas = [delta.reshape(20, 3, 2, 2) for delta in task_matrices(3, 20, 12)]
    found = merge(deltas, convolutions=True)
    assert found.shape == (20, 3, 2, 2)
    np.testing.assert_allclose(found.flatten(1), merge([d.reshape(20, 12) for d in deltas]), atol=1e-6)


def test_excluded_names_are_averaged():
    deltas = task_matrices(2, 10, 8)
    for name, patterns in (("text_projection.weight", None), ("a.embed.weight", ["*embed*"])):
        settings = {} if patterns is None else {"exclude": patterns}
        np.testing.assert_allclose(merge(deltas, name=name, **settings), sum(deltas) / 2, atol=1e-6)


def test_ablations():
    deltas = task_matrices(3, 40, 36)
    np.testing.assert_allclose(merge(deltas, low_rank=False, orthogonalize="none"), sum(deltas), atol=1e-5)
    truncated = []
    for delta in deltas:
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        truncated.append((u[:, :12] * s[:12]) @ vt[:12])
    np.testing.assert_allclose(merge(deltas, orthogonalize="none"), sum(truncated), atol=1e-5)
    assert relative(merge(deltas, low_rank=False), naive_tsv(deltas, 36)) < 1e-5
    whitened = merge(deltas, orthogonalize="whiten", rank_fraction=0.25)
    assert relative(whitened, naive_tsv(deltas, 9)) < 1e-4


def test_weights_scale_the_task_vectors():
    deltas = task_matrices(2, 12, 40)
    scaled = [deltas[0] * 0.5, deltas[1] * 2]
    np.testing.assert_allclose(merge(deltas, weight=[0.5, 2.0]), merge(scaled), atol=1e-5)


def test_order_of_experts_changes_rounding_only():
    deltas = task_matrices(4, 50, 40)
    assert relative(merge(deltas[::-1]), merge(deltas).numpy()) < 1e-5


def test_inputs_are_left_alone():
    group = group_of(task_matrices(2, 12, 10), torch.randn(12, 10))
    before = [model.clone() for model in (*group.models, group.base)]
    build(TSV, {"weight": [0.3, 0.7]}, group.labels).merge(group)
    assert all(torch.equal(a, b) for a, b in zip(before, (*group.models, group.base), strict=True))


def test_parts_are_reusable():
    deltas = [torch.from_numpy(delta) for delta in task_matrices(3, 45, 60)]
    np.testing.assert_allclose(orthogonal_sum(decompose(deltas, 15)), merge(deltas), atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(t=st.integers(5, 9), n=st.integers(4, 24), seed=st.integers(0, 99))
def test_truncation_theorem(t, n, seed):
    """For T > 4 and k ≤ n (T − 2√T)/T, orthogonalising truncated bases costs no more than whole ones."""
    rng = np.random.default_rng(seed)
    bases = [np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(t)]

    def procrustes_error(k):
        u = np.concatenate([basis[:, :k] for basis in bases], axis=1)
        p, _, q = np.linalg.svd(u, full_matrices=False)
        return np.linalg.norm(u - p @ q)

    bound = int(n * (t - 2 * np.sqrt(t)) / t)
    full = procrustes_error(n)
    assert full == pytest.approx(np.sqrt(n) * (np.sqrt(t) - 1))
    assert all(procrustes_error(k) <= full + 1e-9 for k in range(1, bound + 1))


def test_through_the_engine():
    base = {"a.weight": torch.randn(40, 36), "norm.weight": torch.ones(8), "steps": torch.tensor([7])}
    deltas = task_matrices(3, 40, 36)
    models = [
        {
            "a.weight": base["a.weight"] + torch.from_numpy(d),
            "norm.weight": base["norm.weight"] + i,
            "steps": base["steps"],
        }
        for i, d in enumerate(deltas)
    ]
    merged = merganser.merge(models, method="tsv", base=base)
    np.testing.assert_allclose(merged["a.weight"], merge(deltas, base["a.weight"]), atol=1e-5)
    np.testing.assert_allclose(merged["norm.weight"], torch.full((8,), 2.0))
    assert torch.equal(merged["steps"], base["steps"])


def test_memory_is_declared():
    rule = build(TSV, {}, ["a"] * 8)
    spec = TensorSpec((32000, 2048), torch.float32)
    assert 2048 * 2048 * 8 < rule.scratch(spec, 8) < 24 * spec.nbytes
