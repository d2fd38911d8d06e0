"""Segments, barriers and planes."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.align import reset_batch_norm
from merganser.analysis import landscape as ls
from merganser.errors import InputError


def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


@pytest.fixture
def batches():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in (8, 8, 3)]


def reference(module, state, batches):
    module.load_state_dict(state)
    module.eval()
    with torch.no_grad():
        x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
        z = module(x)
    return float(F.cross_entropy(z, y)), float((z.argmax(-1) == y).float().mean())


def test_segment_scores_interpolated_models(batches):
    template, a, b = mlp(0), mlp(1).state_dict(), mlp(2).state_dict()
    untouched = {k: v.clone() for k, v in template.state_dict().items()}
    report = ls.segment(template, a, b, batches, F.cross_entropy, points=5)
    for i, x in enumerate(np.linspace(0, 1, 5)):
        mixed = {k: (1 - x) * a[k] + x * b[k] if a[k].is_floating_point() else a[k] for k in a}
        loss, accuracy = reference(mlp(0), mixed, batches)
        assert report.losses[i] == pytest.approx(loss, rel=1e-5)
        assert report.accuracies[i] == pytest.approx(accuracy)
    assert report.barrier == max(report.losses) - (report.losses[0] + report.losses[-1]) / 2
    assert template.training
    assert all(torch.equal(v, untouched[k]) for k, v in template.state_dict().items())
    json.dumps(report.to_dict(), allow_nan=False)


def test_barriers_of_a_known_loss():
    """One weight: the two definitions differ when the ends do, and agree on a hump between equal ends."""
    module = nn.Linear(1, 1, bias=False)
    ends = [{"weight": torch.tensor([[v]])} for v in (0.0, 4.0)]

    def loss(outputs, targets):
        return outputs.mean()  # rises linearly: no hump at all

    batch = [(torch.ones(2, 1), torch.zeros(2))]
    straight = ls.segment(module, *ends, batch, loss)
    assert straight.barrier == pytest.approx(2.0)
    assert straight.barrier_above_chord == pytest.approx(0.0, abs=1e-6)
    hump = ls.segment(module, *ends, batch, lambda z, _: z.mean() * (4 - z.mean()), points=11)
    assert hump.barrier == pytest.approx(4.0)
    assert hump.barrier_above_chord == pytest.approx(4.0)
    assert hump.accuracies[0] is None


def test_plane_passes_through_its_models(batches):
    states = tuple(mlp(s).state_dict() for s in (1, 2, 3))
    report = ls.plane(mlp(0), states, batches, F.cross_entropy, resolution=4, margin=0.1)
    assert report.anchors[0] == (0.0, 0.0)
    weights = [
        torch.cat([v.reshape(-1).double() for k, v in s.items() if v.is_floating_point() and "running" not in k])
        for s in states
    ]
    for i in range(3):
        for j in range(3):
            expected = float((weights[i] - weights[j]).norm())
            assert np.hypot(*np.subtract(report.anchors[i], report.anchors[j])) == pytest.approx(expected, abs=1e-6)
    assert len(report.losses) == 4
    assert report.xs[0] < 0 < report.anchors[1][0] < report.xs[-1]
    json.dumps(report.to_dict(), allow_nan=False)


def test_plane_values_at_the_anchors(batches):
    a = {"weight": torch.zeros(3, 4)}
    b, c = {"weight": torch.zeros(3, 4)}, {"weight": torch.zeros(3, 4)}
    b["weight"][0, 0] = 2.0
    c["weight"][1, 1] = 1.0
    module = nn.Linear(4, 3, bias=False)
    report = ls.plane(module, (a, b, c), batches, F.cross_entropy, resolution=2, margin=0.0)
    corners = {(0, 0): a, (0, 1): b, (1, 0): c, (1, 1): {"weight": b["weight"] + c["weight"]}}
    for (i, j), state in corners.items():
        assert report.losses[i][j] == pytest.approx(reference(nn.Linear(4, 3, bias=False), state, batches)[0], rel=1e-5)


def test_prepare_runs_at_every_point(batches):
    seen = []

    def recompute(module):
        seen.append(module)
        module.train()
        module[1].reset_running_stats()
        module(batches[0][0])
        return module

    a, b = mlp(1).state_dict(), mlp(2).state_dict()
    fixed = ls.segment(mlp(0), a, b, batches, F.cross_entropy, points=3, prepare=recompute)
    assert len(seen) == 3
    assert fixed.losses != ls.segment(mlp(0), a, b, batches, F.cross_entropy, points=3).losses


def test_what_prepare_returns_is_scored(batches):
    """As `reset_batch_norm` and `repair` do it, which return copies."""
    a, b = mlp(1).state_dict(), mlp(2).state_dict()
    inputs = [x for x, _ in batches]
    fresh = partial(reset_batch_norm, batches=inputs)
    middle = mlp(0)
    middle.load_state_dict({name: (a[name] + b[name]) / 2 for name in a}, strict=False)
    expected = ls.score(reset_batch_norm(middle, inputs).eval(), batches, F.cross_entropy)
    found = ls.segment(mlp(0), a, b, batches, F.cross_entropy, points=3, prepare=fresh)
    assert found.losses[1] == pytest.approx(expected.loss, rel=1e-5)
    c = mlp(3).state_dict()
    plain, scored = (
        ls.plane(mlp(0), (a, b, c), batches, F.cross_entropy, resolution=2, prepare=prepare)
        for prepare in (None, fresh)
    )
    assert plain.losses != scored.losses
    with pytest.raises(InputError, match="prepare must return the model to evaluate"):
        ls.segment(mlp(0), a, b, batches, F.cross_entropy, prepare=lambda module: None)


def test_mistakes(batches):
    a, b = mlp(1).state_dict(), mlp(2).state_dict()
    with pytest.raises(InputError, match="rise from 0 to 1"):
        ls.segment(mlp(0), a, b, batches, F.cross_entropy, points=[0.0, 0.5])
    with pytest.raises(InputError, match="one line"):
        ls.plane(mlp(0), (a, b, b), batches, F.cross_entropy, resolution=2)
    with pytest.raises(InputError, match="lacks 1 tensors"):
        ls.segment(mlp(0), a, {k: v for k, v in b.items() if k != "0.bias"}, batches, F.cross_entropy)
    with pytest.raises(InputError, match="such as '1.running_mean'"):
        ls.segment(mlp(0), a, {k: v for k, v in b.items() if k != "1.running_mean"}, batches, F.cross_entropy)
    with pytest.raises(InputError, match="exhausted"):
        ls.segment(mlp(0), a, b, [], F.cross_entropy)


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_shows_in_the_barrier(lost):
    def loss(outputs, targets):
        return torch.tensor(lost if 0.4 < float(outputs.mean()) < 0.6 else 0.1)

    first, second = {"weight": torch.zeros(1, 1)}, {"weight": torch.ones(1, 1)}
    batches = [(torch.ones(2, 1), torch.zeros(2))]
    found = ls.segment(nn.Linear(1, 1, bias=False), first, second, batches, loss)
    for barrier in (found.barrier, found.barrier_above_chord):
        assert barrier == pytest.approx(lost, nan_ok=True)


def test_too_few_points_are_refused():
    module, data = nn.Sequential(nn.Linear(3, 2)), [(torch.randn(4, 3), torch.zeros(4).long())]
    states = [{n: torch.randn_like(t) for n, t in module.state_dict().items()} for _ in range(3)]
    with pytest.raises(InputError, match="rise from 0 to 1"):
        ls.segment(module, states[0], states[1], data, F.cross_entropy, points=-1)
    with pytest.raises(InputError, match="two points a side"):
        ls.plane(module, states, data, F.cross_entropy, resolution=0)
