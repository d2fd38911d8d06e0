"""Random models and hand-made plans over them."""

from __future__ import annotations

import torch
from torch import Tensor

from merganser.checkpoints.base import TensorSpec
from merganser.checkpoints.memory import StateDict
from merganser.engine.plan import Model, Output, Plan, Source


def random_models(count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """A base and fine-tunes of it with tensors of several ranks, one of them of many blocks."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"big": (700, 640), "cube": (3, 40, 50), "row": (1, 300), "bias": (17,), "scalar": (), "empty": (0, 4)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    models = [base] + [
        {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
        for _ in range(count)
    ]
    return [{k: v.to(dtype) for k, v in m.items()} | {"steps": torch.tensor([7, 9])} for m in models]


def make_plan(
    models: list[dict[str, Tensor]], method: str, parameters: dict[str, object] | None = None, shard_size: int = 10**9
) -> tuple[Plan, list[StateDict]]:
    """`method` over everything but the integers; the first model is the base."""
    with_base = method not in ("linear", "slerp", "karcher")
    outputs = []
    for name, tensor in models[0].items():
        spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
        if not tensor.dtype.is_floating_point:
            outputs.append(Output(name, spec, "passthrough", (Source(0, name),)))
            continue
        inputs = tuple(Source(i, name) for i in range(1, len(models)))
        outputs.append(Output(name, spec, method, inputs, Source(0, name) if with_base else None, parameters or {}))
    labels = tuple(Model(f"m{i}", f"m{i}") for i in range(len(models)))
    plan = Plan(labels, tuple(outputs), seed=3, shard_size=shard_size)
    return plan, [StateDict(m, f"m{i}") for i, m in enumerate(models)]
