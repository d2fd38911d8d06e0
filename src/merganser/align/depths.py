"""Models of one width and different depths: match their blocks, and make the shallower one as deep."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from merganser.align.state import State
from merganser.errors import InputError
from merganser.modules.batches import Inputs, forward, reusable
from merganser.modules.moments import evaluating

#: Maximum rows of activations that blocks are compared on.
_ROWS = 4096
#: Blocks whose outputs are less similar than this are unrelated.
_LEAST = 0.1


@dataclass(frozen=True)
class Stretch:
    """A shallow model in the shape of a deeper one.

    Attributes:
        state: Its weights, which compute the same function.
        plan: For every block of the deeper model the block in its place, or None for a block that adds nothing.
        similarity: Linear CKA of the outputs of all blocks, (shallow, deep).

    Example:
        >>> stretched = mg.align.stretch(shallow, deep, [tokens], blocks="layers")  # doctest: +SKIP
        >>> deep.load_state_dict(stretched.state)  # doctest: +SKIP
    """

    state: State
    plan: tuple[int | None, ...]
    similarity: NDArray[np.float64]


def stretch(shallow: nn.Module, deep: nn.Module, batches: Iterable[Inputs], *, blocks: str) -> Stretch:
    """Give a model the depth of another: place its blocks where they fit best, and fill up with blocks that add
    nothing.

    Blocks keep their order; their places maximise the sum of the similarities of their outputs (dynamic programming). A
    block that adds nothing is the deeper model's own with zeros in the layers that write to the residual stream. The
    result computes the function of the shallow model, and can be matched and averaged with the deeper one.

    Args:
        shallow: The model with fewer blocks.
        deep: The model with more of them; all else has the same shapes.
        batches: Inputs to compare blocks on; targets are ignored.
        blocks: The name of the list of blocks, e.g. "model.layers".

    Returns:
        The weights, and the place of every block.

    Raises:
        InputError: If the models differ in more than depth, their blocks are not residual, or they are unrelated.

    Example:
        >>> mg.align.stretch(shallow, deep, [tokens], blocks="layers").plan  # doctest: +SKIP
        (0, None, 1, 2)
    """
    counts = [_count(model, blocks) for model in (shallow, deep)]
    _check(shallow, deep, blocks, counts)
    batches = reusable(batches, "batches")
    similarity = _similarities(shallow, deep, batches, blocks, counts)
    plan = place_blocks(similarity)
    for place, source in enumerate(plan):
        if source is not None and not similarity[source, place] >= _LEAST:
            raise InputError(
                f"block {source} fits nowhere: its output has a similarity (CKA) of {similarity[source, place]:.2f} "
                f"with block {place}, the best place for it; stretch models that were trained on the same inputs"
            )
    own, other = shallow.state_dict(), deep.state_dict()
    state: State = {name: tensor for name, tensor in own.items() if not name.startswith(f"{blocks}.")}
    for place, source in enumerate(plan):
        prefix, taken = f"{blocks}.{place}.", f"{blocks}.{source}."
        silent = silenced(deep, f"{blocks}.{place}", batches) if source is None else frozenset()
        for name in (name for name in other if name.startswith(prefix)):
            state[name] = (
                own[taken + name.removeprefix(prefix)]
                if source is not None
                else torch.zeros_like(other[name])
                if name in silent
                else other[name]
            )
    return Stretch({name: state[name].clone() for name in other}, plan, similarity)


def place_blocks(similarity: NDArray[np.float64]) -> tuple[int | None, ...]:
    """Place n blocks in order among m ≥ n places to maximise the sum of similarities; None for an empty place.

    best[i, j] = max(best[i, j−1], best[i−1, j−1] + similarity[i, j]) over the first i blocks and j places.

    Args:
        similarity: The similarity of every block at every place, shape (n, m).
    """
    n, m = similarity.shape
    best = np.full((n + 1, m + 1), -np.inf)
    best[0] = 0.0
    for i in range(1, n + 1):
        for j in range(i, m + 1):
            best[i, j] = max(best[i, j - 1], best[i - 1, j - 1] + similarity[i - 1, j - 1])
    plan: list[int | None] = [None] * m
    i, j = n, m
    while i:
        if best[i, j] != best[i, j - 1]:
            plan[j - 1] = i = i - 1
        j -= 1
    return tuple(plan)


def silenced(model: nn.Module, block: str, batches: Iterable[Inputs]) -> frozenset[str]:
    """Return the weights of the fewest layers of a residual block that must be zero for it to return its input."""
    part = model.get_submodule(block)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with evaluating(model), torch.no_grad():
        hook = part.register_forward_pre_hook(lambda _m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        with ExitStack() as stack:
            stack.callback(hook.remove)
            forward(model, next(iter(batches)))
        args, kwargs = calls[0]
        stream = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        layers = [
            n for n, m in part.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd) or _turned(m)
        ]
        zero = list(layers)
        for layer in [None, *layers]:  # first zero all of them, then restore one after another
            trial = [name for name in zero if name != layer]
            copy = deepcopy(part)
            for name in trial:
                for parameter in copy.get_submodule(name).parameters():
                    parameter.zero_()
            returned = _tensor(copy(*args, **kwargs))
            if returned.shape == stream.shape and torch.equal(returned, stream):
                zero = trial
            elif layer is None:
                raise InputError(f"{block!r} is not residual: it does not return its input when its layers are zero")
    return frozenset(
        f"{block}.{name}.{leaf}" for name in zero for leaf in dict(part.get_submodule(name).named_parameters())
    )


def _turned(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer."""
    return type(module).__name__ == "Conv1D"


def _count(model: nn.Module, blocks: str) -> int:
    if not isinstance(model, nn.Module):
        raise InputError("models of different depths are run: give modules, not weights")
    found = dict(model.named_modules()).get(blocks)
    if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
        known = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
        raise InputError(f"{blocks!r} is no list of blocks; the model has {', '.join(known) or 'none'}")
    return len(found)


def _check(shallow: nn.Module, deep: nn.Module, blocks: str, counts: list[int]) -> None:
    if counts[0] > counts[1]:
        raise InputError(
            f"the first model has {counts[0]} blocks, the second {counts[1]}: give the shallower one first"
        )

    def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, tensor in model.state_dict().items():
            inside = name.removeprefix(f"{blocks}.") if name.startswith(f"{blocks}.") else None
            found[name if inside is None else f"a block: {inside.partition('.')[2]}"] = tuple(tensor.shape)
        return found

    first, second = shapes(shallow), shapes(deep)
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            raise InputError(f"{name!r} is {first.get(name)} in one model and {second.get(name)} in the other")


def _similarities(
    shallow: nn.Module, deep: nn.Module, batches: Iterable[Inputs], blocks: str, counts: list[int]
) -> NDArray[np.float64]:
    """Return linear CKA ‖YᵀX‖² / ‖XᵀX‖‖YᵀY‖ of the centred outputs of every pair of blocks."""
    first, second = (_features(model, batches, blocks, n) for model, n in zip((shallow, deep), counts, strict=True))
    found = np.zeros((len(first), len(second)))
    norms = [[float((x.T @ x).norm()) for x in own] for own in (first, second)]
    for i, x in enumerate(first):
        for j, y in enumerate(second):
            found[i, j] = float((y.T @ x).square().sum()) / max(norms[0][i] * norms[1][j], 1e-30)
    return found


def _features(model: nn.Module, batches: Iterable[Inputs], blocks: str, count: int) -> list[Tensor]:
    kept: list[list[Tensor]] = [[] for _ in range(count)]
    with ExitStack() as stack, evaluating(model), torch.no_grad():
        for place, rows in enumerate(kept):

            def keep(_module: nn.Module, _inputs: Any, output: Any, rows: list[Tensor] = rows) -> None:
                flat = _tensor(output).flatten(0, -2)
                rows.append(flat[:: max(1, len(flat) // _ROWS)][:_ROWS].double())

            stack.callback(model.get_submodule(f"{blocks}.{place}").register_forward_hook(keep).remove)
        for batch in batches:
            forward(model, batch)
    joined = [torch.cat(rows)[:_ROWS] for rows in kept]
    return [rows - rows.mean(0) for rows in joined]


def _tensor(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
