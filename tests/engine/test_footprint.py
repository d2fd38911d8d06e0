"""The bound on memory, said before the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from merganser.checkpoints.base import Checkpoint
from merganser.engine.footprint import memory_bound
from merganser.engine.merge import Merge
from merganser.engine.nested import Merged
from merganser.engine.plan import Model, Plan, Source
from support.plans import make_plan, random_models


def mean_with(inner: Plan, sources: list[Checkpoint], plain: Checkpoint) -> tuple[Plan, list[Checkpoint]]:
    """The mean of a merge inside and of a plain model."""
    outputs = tuple(
        replace(output, method="linear", inputs=(Source(0, output.name), Source(1, output.name)), base=None)
        for output in inner.outputs
        if not output.copies
    )
    return Plan((Model("inner", plan=inner), Model("plain", "plain")), outputs), [Merged(Merge(inner, sources)), plain]


@pytest.mark.parametrize("method", ["tsv", "linear"])
def test_nested_merges_count(models: list[dict[str, Tensor]], method: str) -> None:
    plan, sources = make_plan(models, method)
    once = mean_with(plan, sources, sources[0])
    twice = mean_with(*once, sources[0])
    alone, nested, deeper = (memory_bound(Merge(*each), 1, 1) for each in ((plan, sources), once, twice))
    tensor = 4 * models[0]["big"].numel()
    assert nested >= alone + tensor
    assert deeper >= nested + tensor


@pytest.mark.parametrize("method", ["linear", "ties", "iso_c", "tsv"])
def test_float64_counts_with_its_bytes(method: str) -> None:
    narrow, wide = (make_plan(random_models(dtype=dtype), method) for dtype in (torch.float32, torch.float64))
    copies = 4 * 4 * narrow[1][0].spec("big").numel
    assert memory_bound(Merge(*wide), 1, 1) >= memory_bound(Merge(*narrow), 1, 1) + copies
