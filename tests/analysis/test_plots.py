"""Figures hold the numbers of their reports and can be written."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from merganser.analysis import disentanglement, gradients, landscape, similarity, trajectory
from merganser.errors import InputError

pytest.importorskip("plotly")
from merganser.analysis import plots


@pytest.fixture
def setting():
    torch.manual_seed(0)
    module = nn.Linear(4, 3).double()
    states = [nn.Linear(4, 3).double().state_dict() for _ in range(3)]
    batches = [(torch.randn(8, 4).double(), torch.randint(0, 3, (8,)))]
    return module, states, batches


def test_figures(setting, tmp_path):
    module, states, batches = setting
    curve = landscape.segment(module, *states[:2], batches, F.cross_entropy, points=3)
    surface = landscape.plane(module, tuple(states), batches, F.cross_entropy, resolution=3)
    weights = similarity.weight_similarity(dict(zip("abc", states, strict=True)))
    regime = trajectory.linear_regime({"run": states})
    projected = trajectory.project({"run": states})
    deltas = tuple({k: s[k] - states[0][k] for k in s} for s in states[1:])
    entangled = disentanglement.disentanglement(
        module, states[0], deltas, ([batches[0][0]], [batches[0][0]]), first=[0.0, 1.0], second=[0.0, 0.5, 1.0]
    )
    losses = gradients.TaskLosses.of(module, F.cross_entropy, {"a": batches, "b": batches})
    order = gradients.observed_order(losses, [0.1, 0.05], alpha=0.5, epochs=2)
    figures = [
        plots.segments({"naive": curve}),
        plots.segments({"naive": curve}, "accuracy"),
        plots.plane(surface),
        plots.plane(surface, "accuracy", log=True),
        plots.similarity(weights),
        plots.similarity(weights, "distance"),
        plots.regime(regime),
        plots.regime(regime, "shares"),
        plots.projection(projected),
        plots.disentanglement(entangled),
        plots.order(order),
    ]
    assert tuple(figures[0].data[0].y) == curve.losses
    assert np.shape(figures[9].data[0].z) == (3, 2)
    figures[2].write_html(tmp_path / "plane.html", include_plotlyjs="cdn")
    assert (tmp_path / "plane.html").stat().st_size > 0
    with pytest.raises(InputError, match="known: cosine, distance"):
        plots.similarity(weights, "cka")
