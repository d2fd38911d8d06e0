"""Gram matrices of the inputs of Linear layers: the statistics of RegMean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.modules.batches import Batch, Inputs, several
from merganser.modules.functional import Weights, check_state, evaluation_copy, run
from merganser.tuning.statistics import Statistics


def linear_grams(
    module: nn.Module,
    batches: Iterable[Inputs] | Iterable[Batch],
    *,
    weights: Weights | None = None,
    include: Sequence[str] = ("*",),
    dtype: torch.dtype | None = None,
) -> Statistics:
    """G = XᵀX / N of every `nn.Linear` whose name matches `include`, keyed by the name of its weight.

    X are the layer's inputs at `weights` (default: the module's own), one row per token or position, N their number;
    targets in the batches play no part. `samples` is the N of the layer that saw most. Layers that no batch reaches
    (whose weight is used without the layer being called, as in `nn.MultiheadAttention`) have none. Sums are kept in
    `dtype`, by default the inputs' own or float32, whichever is wider.
    """
    live = evaluation_copy(module)
    if weights is not None:
        check_state(live, weights)
        live.load_state_dict(dict(weights), strict=False)
    layers = {
        name: layer
        for name, layer in live.named_modules()
        if isinstance(layer, nn.Linear) and any(fnmatchcase(name, pattern) for pattern in include)
    }
    if not layers:
        raise InputError(f"no nn.Linear matches {list(include)}")
    grams: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def watch(name: str) -> Any:
        def hook(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            x = x.to(dtype or torch.promote_types(x.dtype, torch.float32))
            if name not in grams:
                grams[name] = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
                rows[name] = 0
            grams[name].addmm_(x.T, x)
            rows[name] += x.shape[0]

        return hook

    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for batch in several(batches, "batches"):
                run(live, batch)
    finally:
        for handle in handles:
            handle.remove()
    if not grams:
        raise InputError("no batch reached a Linear layer")
    tensors = {f"{name}.weight" if name else "weight": gram / rows[name] for name, gram in grams.items()}
    return Statistics("gram", tensors, max(rows.values()))
