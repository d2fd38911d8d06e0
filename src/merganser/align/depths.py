"""Models of one width and different depths: match their blocks, and make the shallower one as deep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from merganser.align.state import State
from merganser.errors import InputError
from merganser.modules.batches import InputsLike, forward, reusable
from merganser.modules.convolutions import CONVOLUTIONS
from merganser.modules.moments import evaluating, is_turned, run

#: The shapes of tensors by name.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
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


def stretch(shallow: nn.Module, deep: nn.Module, batches: Iterable[InputsLike], *, blocks: str) -> Stretch:
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
    few, many = _list_blocks(shallow, blocks), _list_blocks(deep, blocks)
    _check(shallow, deep, blocks, few, many)
    batches = reusable(batches, "batches")
    similarity = _compare_blocks(shallow, deep, batches, few, many)
    plan = place_blocks(similarity)
    for place, source in enumerate(plan):
        if source is not None and not similarity[source, place] >= _LEAST:
            raise InputError(
                f"block {source} fits nowhere: its output has a similarity (CKA) of {similarity[source, place]:.2f} "
                f"with block {place}, the best place for it; stretch models that were trained on the same inputs"
            )
    own, other = shallow.state_dict(), deep.state_dict()
    state: State = {name: tensor for name, tensor in own.items() if not name.startswith(f"{blocks}.")}
    for block, source in zip(many, plan, strict=True):
        silent = find_silenced(deep, block, batches) if source is None else frozenset()
        for name in (name for name in other if name.startswith(f"{block}.")):
            if source is not None:
                state[name] = own[few[source] + name.removeprefix(block)]
            else:
                state[name] = torch.zeros_like(other[name]) if name in silent else other[name]
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


def find_silenced(model: nn.Module, block: str, batches: Iterable[InputsLike]) -> frozenset[str]:
    """Return the weights of the fewest layers of a residual block that must be zero for it to return its input."""
    part = model.get_submodule(block)
    calls: list[Any] = []
    copied = partial(tree_map_only, Tensor, Tensor.clone)  # a block may add to its input in place
    with evaluating(model), torch.no_grad():
        hook = part.register_forward_pre_hook(lambda _m, *given: calls.append(copied(given)), with_kwargs=True)
        with ExitStack() as stack:
            stack.callback(hook.remove)
            forward(model, next(iter(batches)))
        args, kwargs = calls[0]
        stream = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        layers = [
            n for n, m in part.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd) or is_turned(m)
        ]
        zero = list(layers)
        for layer in [None, *layers]:  # first zero all of them, then restore one after another
            trial = [name for name in zero if name != layer]
            copy = deepcopy(part)
            for name in trial:
                for parameter in copy.get_submodule(name).parameters():
                    parameter.zero_()
            returned = _tensor(copy(*copied(args), **copied(kwargs)))
            if returned.shape == stream.shape and torch.equal(returned, stream):
                zero = trial
            elif layer is None:
                raise InputError(f"{block!r} is not residual: it does not return its input when its layers are zero")
    return frozenset(
        f"{block}.{name}.{leaf}" for name in zero for leaf in dict(part.get_submodule(name).named_parameters())
    )


def _list_blocks(model: nn.Module, blocks: str) -> list[str]:
    if not isinstance(model, nn.Module):
        raise InputError("models of different depths are run: give modules, not weights")
    found = dict(model.named_modules()).get(blocks)
    if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
        known = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
        raise InputError(f"{blocks!r} is not a list of blocks; the model has {', '.join(known) or 'none'}")
    return [f"{blocks}.{name}" for name, _ in found.named_children()]


def _check(shallow: nn.Module, deep: nn.Module, blocks: str, few: Sequence[str], many: Sequence[str]) -> None:
    if len(few) > len(many):
        raise InputError(f"the first model has {len(few)} blocks, the second {len(many)}: give the shallower one first")
    ours, theirs = ({n: tuple(t.shape) for n, t in model.state_dict().items()} for model in (shallow, deep))

    def inside(shapes: Shapes, block: str) -> Shapes:
        return {name.removeprefix(block): shape for name, shape in shapes.items() if name.startswith(f"{block}.")}

    def outside(shapes: Shapes) -> Shapes:
        return {name: shape for name, shape in shapes.items() if not name.startswith(f"{blocks}.")}

    _compare(outside(ours), outside(theirs), "one model", "the other")
    expected = inside(theirs, many[0])
    for shapes, names, model in ((ours, few, "first"), (theirs, many, "second")):
        for name in names:
            _compare(inside(shapes, name), expected, f"{name!r} of the {model} model", f"{many[0]!r} of the second")


def _compare(first: Shapes, second: Shapes, one: str, other: str) -> None:
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            raise InputError(f"{name!r} is {first.get(name)} in {one} and {second.get(name)} in {other}")


def _compare_blocks(
    shallow: nn.Module, deep: nn.Module, batches: Iterable[InputsLike], few: Sequence[str], many: Sequence[str]
) -> NDArray[np.float64]:
    """Return linear CKA ‖YᵀX‖² / ‖XᵀX‖‖YᵀY‖ of the centred outputs of every pair of blocks."""
    first, second = _collect_features(shallow, batches, few), _collect_features(deep, batches, many)
    found = np.zeros((len(first), len(second)))
    norms = [[float((x.T @ x).norm()) for x in own] for own in (first, second)]
    for i, x in enumerate(first):
        for j, y in enumerate(second):
            found[i, j] = float((y.T @ x).square().sum()) / max(norms[0][i] * norms[1][j], 1e-30)
    if not np.isfinite(found).all():
        raise InputError("the outputs of some blocks are not finite: blocks cannot be compared by them")
    return found


def _collect_features(model: nn.Module, batches: Iterable[InputsLike], blocks: Sequence[str]) -> list[Tensor]:
    """Return the centred outputs of every block, (samples and positions, channels)."""
    kept: dict[str, list[Tensor]] = {block: [] for block in blocks}

    def keep(block: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        found = _tensor(output)
        images = found.dim() > 3 and any(isinstance(part, CONVOLUTIONS) for part in module.modules())
        flat = (found.movedim(1, -1) if images else found).flatten(0, -2)
        kept[block].append(flat[:: max(1, len(flat) // _ROWS)][:_ROWS].to(torch.float64, copy=True))

    with ExitStack() as stack, evaluating(model):
        for block in blocks:
            stack.callback(model.get_submodule(block).register_forward_hook(partial(keep, block)).remove)
        run(model, batches)
    joined = [torch.cat(rows)[:_ROWS] for rows in kept.values()]
    return [rows - rows.mean(0) for rows in joined]


def _tensor(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
