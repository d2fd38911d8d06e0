"""Networks that share their first layers and end in several heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from merganser.errors import InputError, did_you_mean
from merganser.modules.batches import InputsLike, forward
from merganser.modules.moments import evaluating


class MultiHead(nn.Module):
    """Copies of one architecture that share weights up to a layer; returns a tuple of outputs, one per copy.

    Layers before the first separate one run once, and the other copies reuse their outputs.
    """

    def __init__(self, heads: Sequence[nn.Module], once: Sequence[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.once = tuple(once)

    @classmethod
    def of(cls, template: nn.Module, states: Sequence[Mapping[str, Tensor]], shared: frozenset[str]) -> nn.Module:
        """Return copies of a template with these weights; the shared ones are the same parameters in all of them."""
        copies = [deepcopy(template) for _ in states]
        for copy, state in zip(copies, states, strict=True):
            copy.load_state_dict(state)
        if len(copies) == 1:
            return copies[0]
        once = []
        for name, module in copies[0].named_modules():
            full = {leaf: f"{name}.{leaf}".lstrip(".") for leaf in _list_weights(module)}
            for store in ("_parameters", "_buffers"):
                for leaf, value in getattr(module, store).items():
                    for copy in copies[1:] if full.get(leaf) in shared else ():
                        getattr(copy.get_submodule(name), store)[leaf] = value
            if full and not _has_parts(module) and shared.issuperset(full.values()):
                once.append(name)
        return cls(copies, once)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        kept: dict[str, list[Any]] = {name: [] for name in self.once}
        first, *others = self.heads
        with ExitStack() as stack:
            for name, outputs in kept.items():
                keep = partial(_keep, outputs)
                stack.callback(first.get_submodule(name).register_forward_hook(keep).remove)
            found = [first(*args, **kwargs)]
        for head in others:
            with ExitStack() as stack:
                for name, outputs in kept.items():
                    stack.enter_context(_replay(head.get_submodule(name), outputs))
                found.append(head(*args, **kwargs))
        return tuple(found)


def _list_weights(module: nn.Module) -> list[str]:
    return [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]


def _has_parts(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _keep(outputs: list[Any], _module: nn.Module, _inputs: Any, output: Any) -> None:
    outputs.append(_clone(output))


def _clone(output: Any) -> Any:
    """Return copies of tensors, which later layers may change in place."""
    return tree_map_only(Tensor, Tensor.clone, output)


@contextmanager
def _replay(module: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """Make a layer return the recorded outputs of another, call by call."""
    left = iter(outputs)
    module.forward = lambda *args, **kwargs: _clone(next(left))
    try:
        yield
    finally:
        del module.forward


@torch.no_grad()
def tail_tensors(module: nn.Module, batches: Iterable[InputsLike], until: str) -> frozenset[str]:
    """Return the tensors of a layer and of all layers that run after it."""
    known = {name: part for name, part in module.named_modules() if name}
    if until not in known:
        raise InputError(f"there is no layer {until!r}{did_you_mean(until, known)}")
    calls: list[str] = []

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _inputs: calls.append(name)

    with ExitStack() as stack, evaluating(module):
        for name, part in known.items():
            stack.callback(part.register_forward_pre_hook(note(name)).remove)
        forward(module, next(iter(batches)))
    begin = next((place for place, name in enumerate(calls) if name == until or name.startswith(f"{until}.")), None)
    if begin is None:
        raise InputError(f"the layer {until!r} does not run on these batches")
    late = {*calls[begin:], until}
    if both := [name for name in calls[:begin] if name in late and _list_weights(known[name])]:
        raise InputError(f"the layer {both[0]!r} runs before and after {until!r} begins: it cannot stay separate")
    return frozenset(name for name in module.state_dict() if any(name.startswith(f"{layer}.") for layer in late))
