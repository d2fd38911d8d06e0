"""Gram matrices of the inputs of Linear layers: the statistics of RegMean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from merganser.errors import InputError
from merganser.modules.batches import Batch, InputsLike, require_several
from merganser.modules.functional import Weights, evaluation_copy, run
from merganser.modules.moments import check_finite
from merganser.tuning.statistics import Statistics


def linear_grams(
    module: nn.Module,
    batches: Iterable[InputsLike] | Iterable[Batch],
    *,
    weights: Weights | None = None,
    include: Sequence[str] = ("*",),
    dtype: torch.dtype | None = None,
) -> Statistics:
    """Compute the Gram matrix G = XᵀX / N of the inputs X of linear layers, N being their number of rows.

    Layers that are not called (as in `nn.MultiheadAttention`, which uses its weights directly) get none.

    Args:
        module: The network; it is not changed.
        batches: Inputs, or pairs of (inputs, targets) whose targets are ignored.
        weights: The weights to run the module with; its own by default.
        include: Globs of the names of the layers.
        dtype: The dtype of the sums; by default float32 or that of the inputs, whichever is wider.

    Returns:
        Statistics for the method `regmean`, by the name of each layer's weight; `save` writes them.

    Raises:
        InputError: If no linear layer matches, or no batch reaches one.

    Example:
        >>> grams = mg.tuning.linear_grams(math, batches)
        >>> grams.tensors["0.weight"].shape
        torch.Size([8, 8])
    """
    live = evaluation_copy(module, weights)
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

    for name, layer in layers.items():
        layer.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for batch in require_several(batches, "batches"):
            run(live, batch)
    if not any(rows.values()):
        raise InputError("no batch reached a Linear layer")
    for name, gram in grams.items():
        check_finite(gram, name)
    tensors = {f"{name}.weight" if name else "weight": gram / rows[name] for name, gram in grams.items()}
    return Statistics("gram", tensors, max(rows.values()))
