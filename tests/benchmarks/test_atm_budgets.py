"""The benchmark of ATM: equal budgets, and the choice of α."""

from __future__ import annotations

import pytest
import torch

from benchmarks import atm

pytest.importorskip("sklearn")


def test_updates_are_counted_in_training_images_whatever_they_are_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    views = atm.Views.of(0)
    counts = []
    monkeypatch.setattr(atm, "tune", lambda network, weights, images, updates, generator: counts.append(updates))
    views.step(views.train["turned"], views.base, 2)
    views.step(views.held_out["turned"], views.base, 2)
    assert counts == [2 * atm.TRAIN // atm.BATCH] * 2
    assert [len(part["turned"][1]) for part in (views.train, views.held_out, views.test)] == [900, 297, 600]


def test_task_arithmetic_takes_the_best_alpha_on_held_out_images() -> None:
    views = atm.Views.of(0)
    generator = torch.Generator().manual_seed(1)
    experts = [
        {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in views.base.items()}
        for _ in range(2)
    ]
    weights, alpha = atm.task_arithmetic(views, experts)
    plain = {n: b + alpha * sum(expert[n] - b for expert in experts) for n, b in views.base.items()}
    for name, value in weights.items():
        torch.testing.assert_close(value, plain[name], atol=1e-5, rtol=1e-5)
    scores = []
    for other in atm.ALPHAS:
        merged = {n: b + other * sum(expert[n] - b for expert in experts) for n, b in views.base.items()}
        scores.append(views.accuracy(merged, views.held_out))
    assert alpha == atm.ALPHAS[scores.index(max(scores))]
