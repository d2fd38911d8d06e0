"""Pages of libraries and of interference: energy and rank curves, layers × pairs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import merganser as mg
from merganser.interference import survey
from merganser.library import Library
from merganser.library.budgets import ranks_by_layer
from merganser.report.contents import shorten_blocks
from merganser.report.directories import report
from merganser.report.interference import fill, pair_chart
from merganser.report.page import Page


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    base = {**{f"model.layers.{i}.w.weight": torch.randn(24, 16) for i in range(11)}, "norm": torch.ones(16)}
    rank = {"one": 1, "two": 3}
    return base, {
        name: {key: t if t.dim() < 2 else t + torch.randn(24, k) @ torch.randn(k, 16) for key, t in base.items()}
        for name, k in rank.items()
    }


def test_a_library_shows_energies_and_ranks(models, tmp_path):
    base, experts = models
    mg.save(base, tmp_path / "base")
    library = Library.build(tmp_path / "base", experts, tmp_path / "library", energy=0.9999)
    ranks = ranks_by_layer(library)
    assert list(ranks["one"]) == [f"model.layers.{i}" for i in range(11)], "in natural order"
    assert set(ranks["one"].values()) == {1.0}
    assert set(ranks["two"].values()) == {3.0}
    page, _ = report(tmp_path / "library")
    html = page.render()
    assert "MiB of all expert files" in html
    assert "two from 3 to 3 in 11 points" in html


def test_pairs_are_compared_with_what_two_unrelated_experts_have(models):
    """Against numpy: ‖Uᵀ_a U_b Σ_b V_bᵀ V_a‖ and its mirror, over ‖Σ‖, in multiples of k/√(d·m)."""
    base, _ = models
    experts = {name: {key: t + torch.randn_like(t) for key, t in base.items()} for name in ("one", "two")}
    found = survey(base, experts, rank_fraction=0.25)
    matrix = found.matrices[0]
    parts = []
    for name in ("one", "two"):
        u, s, vt = np.linalg.svd((experts[name][matrix.name] - base[matrix.name]).double().numpy(), full_matrices=False)
        parts.append((u[:, :4], s[:4], vt[:4].T))
    (u, s, v), (x, t, y) = parts
    cross = np.hypot(np.linalg.norm((u.T @ x * t) @ (y.T @ v)), np.linalg.norm((x.T @ u * s) @ (v.T @ y)))
    assert matrix.pairs[0][1] == pytest.approx(cross / np.hypot(np.linalg.norm(s), np.linalg.norm(t)), rel=1e-3)
    assert matrix.pair_chance == pytest.approx(4 / np.sqrt(24 * 16))
    chart = pair_chart(found)
    assert "11 by 1 values" in chart
    assert "logarithmic" in chart
    assert re.findall(r">(\d+)</span>", chart)[:3] == ["0", "1", "2"], "layers by their numbers"
    page = Page("interference")
    fill(page, found)
    assert len(page.render()) < 200_000


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.layers.0", "a.layers.10"], ["0", "10"]),
        (["a.layers.0", "head"], ["a.layers.0", "head"]),
        (["a.layers.0"], ["a.layers.0"]),
        (["a", "a.b"], ["a", "b"]),
    ],
)
def test_names_of_layers_lose_what_they_share(names, short):
    assert shorten_blocks(names) == short
