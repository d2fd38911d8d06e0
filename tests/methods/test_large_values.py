"""Weights near the limits of their dtype: the result is right or there is an error, for every rule that scales."""

from __future__ import annotations

import pytest
import torch

import merganser as mg
from merganser.errors import InputError
from merganser.methods.registry import registry

#: Rules that need statistics of the models, and one that is a softmax of the weights, which no factor can leave alone.
SKIPPED = ("adarank", "esm", "fisher", "regmean", "arcee_fusion")


def merged(method: str, dtype: torch.dtype, scale: float) -> torch.Tensor:
    rule, generator = registry()[method], torch.Generator().manual_seed(1)
    base, *models = (torch.randn(8, 12, generator=generator, dtype=dtype) for _ in range(4))
    models = [
        (base + 0.5 * model) * scale for model in models[: 1 if method == "slerp" else int(min(rule.models[1], 3))]
    ]
    options = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.3 * scale}}.get(method, {})
    if rule.base == "required" or method == "slerp":
        options["base"] = {"w": base * scale}
    return mg.merge([{"w": model} for model in models], method, **options)["w"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 2.0**70), (torch.float32, 2.0**125), (torch.float64, 2.0**1000)], ids=str
)
@pytest.mark.parametrize("method", sorted({*registry()} - {*SKIPPED}))
def test_nothing_overflows_silently(method, dtype, scale):
    expected = merged(method, dtype, 1.0)
    try:
        found = merged(method, dtype, scale)
    except InputError as error:
        assert "too large for" in str(error) or "cannot decompose" in str(error)
    else:
        torch.testing.assert_close(found / scale, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("method", ["ace", "wudi", "task_arithmetic"])
def test_task_vectors_that_overflow_are_refused(method):
    base = torch.full((6, 8), -3e38)
    models = [{"w": base * torch.linspace(-1, 1, 48).view(6, 8).roll(i)} for i in range(2)]
    with pytest.raises(InputError, match="too large for"):
        mg.merge(models, method, base={"w": base})
