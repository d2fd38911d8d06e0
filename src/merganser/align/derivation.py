"""Derive the permutation symmetries of any module from its traced graph."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from merganser.align.moments import evaluating
from merganser.align.selftest import self_test as run_self_test
from merganser.align.symmetries import Symmetry
from merganser.align.tracing.dims import ONE, Axes, Dim, fresh, pin
from merganser.align.tracing.emission import emit
from merganser.align.tracing.graph import Trace, tensors
from merganser.align.tracing.storage import identity, overlapping
from merganser.errors import InputError

Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any]


def symmetry(
    module: torch.nn.Module,
    example_inputs: Inputs,
    *,
    kwargs: Mapping[str, Any] | None = None,
    self_test: bool = True,
    seed: int = 0,
) -> Symmetry:
    """Every permutation symmetry of `module` that its graph shows, self-tested.

    The module is exported (`torch.export`, undecomposed, evaluation mode) on the example inputs: a tensor, a sequence
    of positional arguments, or a mapping of keyword arguments. Axes of inputs and outputs, and of whatever an operation
    without a rule touches, are pinned: the result may be smaller than the full group of symmetries, never larger.

    With `self_test`, random weights are permuted at random and must compute the same function in float64; a
    derivation that fails raises `MerganserError`. Models of transformers are traced without their key-value cache.
    """
    args, named = arguments(module, example_inputs, kwargs or {})
    with traceable(module):
        program = _export(module, args, named)
        found = _derive(module, program)
        if self_test:
            run_self_test(module, found, args, named, seed=seed)
    return found


def arguments(
    module: torch.nn.Module, example_inputs: Inputs, kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the forward pass."""
    named = dict(kwargs)
    args: tuple[Any, ...] = ()
    if isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Mapping):
        named = {**example_inputs, **named}
    else:
        args = tuple(example_inputs)
    if "use_cache" in signature(module.forward).parameters:
        named.setdefault("use_cache", False)
    return args, named


@contextmanager
def traceable(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no fused attention kernels; everything is put back after."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with evaluating(module), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _export(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        where = _users_line(error)
        raise InputError(
            f"cannot trace {type(module).__name__}{where}: {str(error).strip().splitlines()[0]}; "
            "torch.export needs a forward pass whose control flow does not depend on the values of tensors"
        ) from error


def _users_line(error: BaseException) -> str:
    """`" at file:line (code)"` of the innermost frame outside PyTorch and this package."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(directory) for directory in ours):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""


def _derive(module: torch.nn.Module, program: torch.export.ExportedProgram) -> Symmetry:
    state = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    axes = {identity(tensor): fresh(tensor.shape) for tensor in state.values()}
    used: set[Hashable] = set()
    inputs: dict[str, Any] = {}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    constants = _constants(module, program)
    for spec in program.graph_signature.input_specs:
        name, example = spec.arg.name, nodes[spec.arg.name].meta.get("val")
        tensor = constants.get(str(spec.target))
        if not isinstance(example, torch.Tensor):
            inputs[name] = example
        elif tensor is None:
            inputs[name] = fresh(example.shape, pinned=True)
        elif (key := identity(tensor)) in axes:
            inputs[name] = axes[key]
            used |= {key} if nodes[name].users else set()
        else:
            inputs[name] = _constant_axes(tensor)
    trace = Trace()
    for result in tensors(trace.run(program.graph_module, inputs)):
        pin(*result)
    for key, unused in axes.items():
        if key not in used:
            pin(*unused)
    for tensor in overlapping(state.values()):
        pin(*axes[identity(tensor)])
    first: dict[Hashable, str] = {}
    aliases = {name: first[key] for name, t in state.items() if first.setdefault(key := identity(t), name) != name}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return emit({name: axes[identity(t)] for name, t in state.items()}, trace, buffers & set(state), aliases)


def _constants(module: torch.nn.Module, program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """The tensors of a program that are not its inputs, by name: parameters, buffers, and what it closes over."""
    lifted = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {**lifted, **dict(chain(*named))}


def _constant_axes(tensor: torch.Tensor) -> Axes:
    """Axes of a tensor that is no weight: free where its values do not change (a bias of zeros), else pinned."""

    def uniform(dim: int) -> bool:
        return not tensor.is_meta and bool((tensor == tensor.narrow(dim, 0, 1)).all())

    return Axes(Dim(n, pinned=not uniform(d)) if n > 1 else ONE for d, n in enumerate(tensor.shape))
