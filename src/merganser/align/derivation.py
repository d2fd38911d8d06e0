"""Derive the permutation symmetries of any module from its traced graph."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from merganser.align.moments import evaluating
from merganser.align.selftest import self_test as run_self_test
from merganser.align.symmetries import Symmetry
from merganser.align.tracing.coverage import pin_unreached
from merganser.align.tracing.dims import ONE, Axes, Dim, fresh, pin
from merganser.align.tracing.emission import emit
from merganser.align.tracing.graph import Trace, tensors
from merganser.align.tracing.storage import identity, overlapping
from merganser.batches import Arguments, Inputs, arguments
from merganser.errors import InputError


def symmetry(
    module: torch.nn.Module,
    example_inputs: Inputs,
    *,
    kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[Inputs] = (),
    allow_unused: bool = False,
    self_test: bool = True,
    seed: int = 0,
) -> Symmetry:
    """Every permutation symmetry of `module` that its graph shows, self-tested.

    The module is exported (`torch.export`, undecomposed, evaluation mode) on the example inputs: a tensor, a sequence
    of positional arguments, or a mapping of keyword arguments. Axes of inputs and outputs, and of whatever an operation
    without a rule touches, are pinned: the result may be smaller than the full group of symmetries, never larger.

    A branch that the example does not take is not seen. `more_examples` are traced too, and what is found holds for all
    of them. Weights that none of them uses are never moved. One with an axis at least as long as the shortest that
    moves may belong to such a branch (a second head, one for training only) and read moving units there, flattened or
    beside others, and is refused. With `allow_unused` you say that it does not, or that you do not need it.

    With `self_test`, random weights are permuted at random and must compute the same function in float64; a
    derivation that fails raises `MerganserError`. Models of transformers are traced without their key-value cache.
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"symmetries are derived from an nn.Module, got {type(module).__name__}")
    if isinstance(more_examples, torch.Tensor | Mapping):
        raise InputError("more_examples is a sequence of example inputs: write more_examples=[…]")
    examples = [_example(module, inputs, kwargs or {}) for inputs in (example_inputs, *more_examples)]
    with traceable(module):
        found, unused = _derive(module, [_export(module, args, named) for args, named in examples])
        if not allow_unused:
            _refuse_unused(found, unused)
        if self_test:
            for args, named in examples:
                run_self_test(module, found, args, kwargs=named, seed=seed)
    return found


def _example(module: torch.nn.Module, inputs: Inputs, kwargs: Mapping[str, Any]) -> Arguments:
    """Positional and keyword arguments of the forward pass."""
    args, own = arguments(inputs)
    named = {**own, **kwargs}
    for tensor in tree_leaves((args, named)):
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
            raise InputError(f"an example input is empty, of shape {tuple(tensor.shape)}: nothing flows through it")
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
        with _quiet(logging.getLogger("torch._subclasses.fake_tensor")):
            return torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        name = type(module).__name__
        if (own := _failure(module, args, kwargs)) is not None:
            raise InputError(f"{name} does not run on the example inputs{_users_line(own)}: {_summary(own)}") from own
        raise InputError(
            f"cannot trace {name}{_users_line(error)}: {_summary(error)}; "
            "torch.export needs a forward pass whose control flow does not depend on the values of tensors"
        ) from error


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Tracebacks that torch logs on their way to us are not shown twice."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _failure(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What goes wrong without any tracing: a wrong example, not a forward pass that cannot be traced."""
    try:
        module(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _summary(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _users_line(error: BaseException) -> str:
    """`" at file:line (code)"` of the innermost frame outside PyTorch and this package."""
    ours = (Path(torch.__file__).parent, Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(directory) for directory in ours):
            return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""


def _derive(
    module: torch.nn.Module, programs: Sequence[torch.export.ExportedProgram]
) -> tuple[Symmetry, dict[str, torch.Tensor]]:
    """What the programs have in common, and the tensors that none of them uses."""
    state = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    axes = {identity(tensor): fresh(tensor.shape) for tensor in state.values()}
    used: set[Hashable] = set()
    trace = Trace()
    for program in programs:
        used |= _walk(module, program, axes, trace)
    pin(*(dim for result in trace.outputs for dim in result))
    pin_unreached(axes.values(), trace)
    pin(*(dim for tensor in overlapping(state.values()) for dim in axes[identity(tensor)]))
    pin(*(dim for own in axes.values() if 0 in own.shape for dim in own))
    first: dict[Hashable, str] = {}
    aliases = {name: first[key] for name, t in state.items() if first.setdefault(key := identity(t), name) != name}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    found = emit({name: axes[identity(t)] for name, t in state.items()}, trace, buffers & set(state), aliases)
    return found, {name: tensor for name, tensor in state.items() if identity(tensor) not in used}


def _walk(
    module: torch.nn.Module, program: torch.export.ExportedProgram, axes: Mapping[Hashable, Axes], trace: Trace
) -> set[Hashable]:
    """Let one program teach the axes of the weights; the weights it uses."""
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
    trace.outputs += tensors(trace.run(program.graph_module, inputs))
    return used


def _refuse_unused(found: Symmetry, unused: Mapping[str, torch.Tensor]) -> None:
    moved = {found.tensor_shape(name)[dim] for places in found.occurrences.values() for name, dim in places}
    # A flattened axis is a multiple of its units, a concatenated one a sum with others: no shorter than the units.
    least = min(moved, default=None)
    if least is None:
        return
    suspects = [n for n, t in unused.items() if t.is_floating_point() and max(t.shape, default=0) >= least]
    if suspects:
        shown = ", ".join(repr(name) for name in suspects[:3]) + (", …" if len(suspects) > 3 else "")
        raise InputError(
            f"the example inputs leave out weights that are wide enough to read units that move: {shown}; give "
            "more_examples that use them, or allow_unused=True (--allow-unused) if you do not need what they are for"
        )


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
