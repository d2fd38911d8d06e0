"""Routers: the residual is what it is defined to be, and the smallest one finds the task."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from torch import nn

from merganser.errors import InputError
from merganser.library import Library
from merganser.modules.activations import capture, pool
from merganser.modules.inputs import Inputs
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.choices import choose, task_accuracy
from merganser.routing.routers import (
    CalibratedRouter,
    MlpRouter,
    NearestNeighbour,
    ProjectionRouter,
    normalized,
    residuals,
    subspaces,
)
from support.expert_nets import encoder, library_of


def bases(rng, width, ranks):
    return [torch.from_numpy(np.linalg.qr(rng.standard_normal((width, k)))[0]) for k in ranks]


@given(st.integers(0, 10_000), st.integers(4, 20), st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_residual_is_its_definition(seed, width, ranks):
    rng = np.random.default_rng(seed)
    found = bases(rng, width, ranks)
    z = torch.from_numpy(rng.standard_normal((3, width)))
    expected = np.array([[np.linalg.norm(x - v.numpy() @ (v.numpy().T @ x)) for v in found] for x in z.numpy()])
    np.testing.assert_allclose(residuals(z, found), expected, atol=1e-7)
    router = ProjectionRouter(tuple(map(str, range(len(ranks)))), {"l": tuple(found)}, normalize="softmax")
    softmax = np.exp(-expected) / np.exp(-expected).sum(1, keepdims=True)
    np.testing.assert_allclose(router.weights({"l": z}), softmax, atol=1e-7)
    two = ProjectionRouter(router.tasks, {"l": tuple(found), "m": tuple(found)})
    scaled = expected / np.linalg.norm(z.numpy(), axis=1, keepdims=True)
    np.testing.assert_allclose(two.residuals({"l": z, "m": 7 * z}), scaled, atol=1e-7)


def test_the_smallest_residual_is_the_most_likely_task():
    """Under z − V Vᵀ z ~ N(0, σ² I) and equal priors, the posterior orders tasks as −r² does."""
    rng = np.random.default_rng(0)
    found = bases(rng, 8, [2, 2, 2, 2])
    z = rng.standard_normal((50, 8))
    density = multivariate_normal(np.zeros(8), 0.3**2 * np.eye(8))
    joint = np.stack([density.pdf(z - z @ v.numpy() @ v.numpy().T) for v in found], axis=1)
    r = residuals(torch.from_numpy(z), found).numpy()
    np.testing.assert_array_equal(joint.argmax(1), r.argmin(1))
    posterior = joint / joint.sum(1, keepdims=True)
    likelihood = np.exp(-(r**2) / (2 * 0.3**2))
    np.testing.assert_allclose(posterior, likelihood / likelihood.sum(1, keepdims=True), rtol=1e-8)
    # Samples drawn from the model itself: the estimate is right far more often than chance.
    truth = rng.integers(0, 4, 400)
    drawn = np.stack([found[t].numpy() @ rng.standard_normal(2) + 0.05 * rng.standard_normal(8) for t in truth])
    assert (residuals(torch.from_numpy(drawn), found).argmin(1).numpy() == truth).mean() > 0.9


def test_routing_is_perfect_on_planted_orthogonal_subspaces(tmp_path):
    """Each expert reads 4 of 16 orthonormal directions; inputs of its task lie in them."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)).eval()
    basis = torch.linalg.qr(torch.randn(16, 16)).Q
    tasks = ("a", "b", "c", "d")
    spans = {task: basis[:, 4 * index : 4 * index + 4] for index, task in enumerate(tasks)}
    experts = {}
    for task, span in spans.items():
        state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        state["0.weight"] += torch.randn(24, 4) @ span.T
        experts[task] = state
    library = library_of(tmp_path, base, experts, rank_fraction=0.25)
    x = torch.cat([torch.randn(20, 4) @ span.T for span in spans.values()])
    truth = [task for task in tasks for _ in range(20)]
    for source in ("base", "fixed"):
        for normalize in ("softmax", "zscore"):
            model = AdaptiveModel(base, library, layer="0", source=source, normalize=normalize, threshold=0.9)
            routing = model.route(x)
            assert [next(iter(chosen)) for chosen in routing.sets] == truth
            assert task_accuracy(routing.tasks, routing.weights, truth).first == 1.0
    assert model.router.residuals({"0": x}).min(1).values.max() < 1e-2


def test_half_precision_subspaces_are_made_orthonormal_again(tmp_path):
    base = encoder()
    expert = {n: t + (torch.randn(t.shape) if t.dim() == 2 else 0) for n, t in base.state_dict().items()}
    for dtype in ("bfloat16", "int8"):
        library = Library.build(
            base.state_dict(), {"a": expert}, tmp_path / dtype, rank_fraction=0.25, dtype=dtype, copy_base=True
        )
        (v,) = subspaces(library, "blocks.0.up.weight")
        torch.testing.assert_close(v.T @ v, torch.eye(v.shape[1]), atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="singular vectors of a matrix"):
        subspaces(library, "blocks.0.norm.weight")
    with pytest.raises(InputError, match="has no tensor"):
        subspaces(library, "blocks.9.up.weight")
    with pytest.raises(InputError, match="at least one layer"):
        ProjectionRouter.of(library, [])


def test_zscores_have_no_unit():
    r = torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(normalized(-r, "zscore"), normalized(-1000 * r - 5, "zscore"))
    torch.testing.assert_close(normalized(-r, "zscore")[1], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert not torch.allclose(normalized(-r, "softmax"), normalized(-1000 * r, "softmax"))


@given(st.integers(0, 10_000), st.integers(2, 8), st.floats(1e-6, 0.3), st.floats(1e-3, 1e3))
@settings(max_examples=60, deadline=None)
def test_near_ties_stay_near_ties(seed, tasks, spread, unit):
    r = torch.from_numpy(1 + spread * np.random.default_rng(seed).standard_normal((3, tasks))).abs()
    weights = normalized(-r, "zscore")
    torch.testing.assert_close(weights, normalized(-unit * r, "zscore"))
    torch.testing.assert_close(weights.argsort(1, descending=True), r.argsort(1))
    odds = (weights.amax(1) / weights.amin(1)).log()
    assert bool((odds <= (r.amax(1) - r.amin(1)) / (0.02 * r.mean(1)) + 1e-9).all())


def test_two_experts_are_weighed_by_the_evidence():
    """Always .88 and .12 by z-scores alone: a tie was a decision, and two experts were never merged."""
    apart = torch.tensor([0.0, 0.001, 0.01, 0.02, 0.1, 0.5], dtype=torch.float64)
    weights = normalized(-torch.stack([torch.ones(6, dtype=torch.float64), 1 + apart], dim=1), "zscore")
    best = weights[:, 0]
    assert best[0] == 0.5
    assert bool((best.diff()[:4] > 0.01).all())
    torch.testing.assert_close(best[-2:], torch.full((2,), 2.0, dtype=torch.float64).sigmoid())
    assert [len(chosen) for chosen in choose("ab", weights, 0.2, 2).sets] == [2, 2, 2, 2, 1, 1]


@given(st.integers(0, 10_000), st.integers(1, 5), st.floats(0, 1), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_sets_are_the_best_above_the_threshold(seed, tasks, threshold, top):
    weights = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(tasks), 4))
    names = [f"t{index}" for index in range(tasks)]
    routing = choose(names, weights, threshold, top)
    for row, chosen, fallback in zip(weights.tolist(), routing.sets, routing.fallback.tolist(), strict=True):
        ranked = sorted(range(tasks), key=lambda task: -row[task])
        above = [names[task] for task in ranked if row[task] >= threshold][:top]
        assert fallback == (not above)
        assert chosen == frozenset(above or [names[ranked[0]]])


def test_ties_go_to_the_first():
    routing = choose("abc", torch.full((1, 3), 1 / 3), 0.5, 2)
    assert routing.sets == (frozenset("a"),)
    assert routing.fallback.all()
    assert choose("abc", torch.full((1, 3), 1 / 3), 0.3, 2).sets == (frozenset("ab"),)


def test_routers_with_data_find_separate_tasks():
    torch.manual_seed(0)
    centres = 4 * torch.randn(3, 10)
    support = {task: centre + torch.randn(20, 10) for task, centre in zip("abc", centres, strict=True)}
    z = torch.cat([centre + torch.randn(15, 10) for centre in centres])
    truth = [task for task in "abc" for _ in range(15)]
    for router in (
        NearestNeighbour.fit("l", support),
        MlpRouter.fit("l", support, hidden=16, steps=60),
    ):
        weights = router.weights({"l": z})
        torch.testing.assert_close(weights.sum(1), torch.ones(len(z), dtype=weights.dtype))
        assert task_accuracy(router.tasks, weights, truth).first > 0.9
        assert router.layers == ("l",)
    same = MlpRouter.fit("l", support, hidden=16, steps=60)
    assert torch.equal(same.weights({"l": z}), weights), "training is seeded"
    with pytest.raises(InputError, match="support of task 'a'"):
        NearestNeighbour.fit("l", {"a": torch.zeros(0, 3)})
    for fit in (NearestNeighbour.fit, MlpRouter.fit):
        with pytest.raises(InputError, match="no support"):
            fit("l", {})
        with pytest.raises(InputError, match="several widths"):
            fit("l", {"a": torch.ones(1, 3), "b": torch.ones(1, 4)})


@pytest.fixture
def projection():
    rng = torch.Generator().manual_seed(0)
    bases = tuple(torch.linalg.qr(torch.randn(10, rank, generator=rng)).Q for rank in (2, 5, 3))
    return ProjectionRouter(("a", "b", "c"), {"l": bases}, "base")


def test_calibrated_weights_are_those_of_gaussians_with_one_covariance(projection):
    rng = torch.Generator().manual_seed(1)
    support = {task: torch.randn(n, 10, generator=rng) * (1 + n / 9) for task, n in (("a", 9), ("b", 5), ("c", 7))}
    z = torch.randn(4, 10, generator=rng)
    router = CalibratedRouter.fit(projection, {task: {"l": x} for task, x in support.items()}, shrinkage=0.3)
    assert (router.tasks, router.layers, router.source) == (("a", "b", "c"), ("l",), "base")

    seen = [projection.residuals({"l": x}).numpy() for x in support.values()]
    spread = np.concatenate(seen).std(0)
    around = np.concatenate([(r - r.mean(0)) / spread for r in seen])
    covariance = 0.7 * around.T @ around / 21 + 0.3 * (around**2).mean() * np.eye(3)
    gaps = [(projection.residuals({"l": z}).numpy() - r.mean(0)) / spread for r in seen]
    density = np.stack([np.exp(-np.einsum("si,ij,sj->s", g, np.linalg.inv(covariance), g) / 2) for g in gaps], 1)
    np.testing.assert_allclose(router.weights({"l": z}), density / density.sum(1, keepdims=True), rtol=1e-8)


def test_calibration_finds_a_task_whose_subspace_is_never_the_closest(projection):
    """The subspace of b is the largest and holds most of any input."""
    rng = torch.Generator().manual_seed(2)
    bases = dict(zip("abc", projection.subspaces["l"], strict=True))

    def samples(task, count):
        inside = torch.randn(count, bases[task].shape[1], generator=rng) @ bases[task].T
        return {"l": inside + 1.5 * torch.randn(count, 10, generator=rng)}

    router = CalibratedRouter.fit(projection, {task: samples(task, 400) for task in "abc"})
    z = samples("a", 400)
    first = [float((each.weights(z).argmax(1) == 0).double().mean()) for each in (projection, router)]
    assert first[0] < 0.2 < 2 * first[0] + 0.2 < first[1]


def test_a_calibration_works_with_single_samples_and_needs_all_tasks(projection):
    single = {task: {"l": projection.subspaces["l"][place].sum(1)[None]} for place, task in enumerate("abc")}
    router = CalibratedRouter.fit(projection, single)
    assert [int(router.weights(z).argmax()) for z in single.values()] == [0, 1, 2]
    with pytest.raises(InputError, match="no support of task 'b'"):
        CalibratedRouter.fit(projection, {"a": single["a"]})
    with pytest.raises(InputError, match="shrinkage 0"):
        CalibratedRouter.fit(projection, single, shrinkage=0)


def test_task_accuracy_counts_per_task():
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.1, 0.2, 0.7]])
    found = task_accuracy("abc", weights, ["a", "b", "b", "b"], top=2)
    assert found.per_task == {"a": 1.0, "b": 0.0}
    assert found.first == 0.5
    assert found.among == 1.0


def test_capture_stops_at_the_last_layer_asked_for():
    module = encoder()
    x = torch.randn(3, 4, 16)
    calls = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    seen = capture(module, Inputs((x,)), ["blocks.1.up"])
    assert calls == ["blocks.0.up", "blocks.0.down"]
    assert seen.rows == 12
    inner = module.blocks[0](x)
    torch.testing.assert_close(seen.inputs["blocks.1.up"], module.blocks[1].norm(inner).mean(1).detach())
    calls.clear()
    capture(module, Inputs((x,)), ["blocks.2.up", "blocks.0.down"])
    assert calls[-1] == "blocks.1.down"


def test_pooling_respects_the_mask():
    x = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    torch.testing.assert_close(pool(x, "mean", mask)[0], x[0, :2].mean(0))
    assert torch.equal(pool(x, "last", mask), torch.stack([x[0, 1], x[1, 2]]))
    assert torch.equal(pool(x, "first", mask), x[:, 0])
    assert torch.equal(pool(x, "last"), x[:, -1])
    assert torch.equal(pool(x, "mean", mask[:, :2]), x.mean(1)), "a mask of other tokens does not count"
    assert pool(x[..., None].transpose(2, 3), "mean").shape == (2, 2)
