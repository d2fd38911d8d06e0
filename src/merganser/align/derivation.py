"""Derive the permutation symmetries of any module from its traced graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from merganser.align.buffers import moving_buffers as find_moving_buffers
from merganser.align.execution import example_arguments, plain_kernels, private_copy, use_experts
from merganser.align.outputs import Outputs
from merganser.align.selftest import prove
from merganser.align.symmetries import Symmetry
from merganser.align.tracing.calls import RULES
from merganser.align.tracing.coverage import pin_unreached
from merganser.align.tracing.dims import ONE, Axes, Dim, Positions, because, fresh, pin
from merganser.align.tracing.emission import emit
from merganser.align.tracing.exporting import export
from merganser.align.tracing.graph import Trace, tensors
from merganser.align.tracing.liveness import eliminate_dead, keep_outputs
from merganser.align.tracing.routers import pin_targets
from merganser.align.tracing.storage import identity, overlapping
from merganser.errors import InputError, one_of
from merganser.excerpts import list_some
from merganser.modules.batches import InputsLike

SymmetryKind = Literal["permutation", "orthogonal"]
_GROUPED = "transformers::grouped_mm_fallback"
"""The experts of transformers by default. Without a rule for it, they are traced as batched products."""


def symmetry(
    module: torch.nn.Module,
    example_inputs: InputsLike,
    *,
    kind: SymmetryKind = "permutation",
    kwargs: Mapping[str, Any] | None = None,
    more_examples: Sequence[InputsLike] = (),
    outputs: Outputs | None = None,
    moving_buffers: Sequence[str] = (),
    allow_unused: bool = False,
    self_test: bool = True,
    seed: int = 0,
) -> Symmetry:
    """Derive every permutation symmetry of `module` that its graph shows, and self-test it.

    A copy of the module is exported (`torch.export`, undecomposed, evaluation mode) on the example inputs. Axes of
    inputs and outputs, of constant buffers, and of whatever an operation without a rule touches, are pinned: the result
    may be smaller than the full group of symmetries, never larger. `Symmetry.why` says what pins an axis.

    A branch that the example does not take is not seen. `more_examples` are traced too, and what is found holds for all
    of them. Weights that none of them uses are never moved. One with an axis at least as long as the shortest that
    moves may belong to such a branch (a second head, one for training only) and read moving units there, flattened or
    beside others, and is refused. With `allow_unused` you say that it does not, or that you do not need it.

    With `self_test`, random weights are permuted at random and must compute the same function in float64. Models of
    transformers are traced without their key-value cache.

    Args:
        module: The network; it is not changed, and runs afterwards as it did before.
        example_inputs: A tensor, a sequence of positional arguments, or a mapping of keyword arguments.
        kind: "permutation", or "orthogonal" for orthogonal maps too, of the units that everything reads linearly: the
            residual stream of a pre-norm transformer, queries and keys, values and outputs of a head. Models are then
            brought into a canonical form (`Symmetry.canonical`) first, which computes the same function.
        kwargs: More keyword arguments of the forward pass, for all examples.
        more_examples: Other example inputs.
        outputs: The outputs that must stay as they are, if not all: a name such as "logits", a path into nested
            outputs, several of them, or a function that picks them. The units of other outputs may change their order.
        moving_buffers: Names or globs of buffers that have an entry for each unit and differ between models. Running
            statistics, the vectors of spectral normalisation and pruning masks are known; other buffers are constants.
        allow_unused: Go on where weights that no example uses may read units that move.
        self_test: Whether to test what was derived.
        seed: Of the self-test.

    Returns:
        The symmetry of the module's state dict.

    Raises:
        InputError: The module cannot be traced on the examples, or the self-test is inconclusive.
        MerganserError: The self-test failed.

    Example:
        >>> symmetry = mg.align.symmetry(base, images)
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"symmetries are derived from an nn.Module, got {type(module).__name__}")
    one_of("kind of symmetry", kind, SymmetryKind)
    if isinstance(more_examples, torch.Tensor | Mapping):
        raise InputError("more_examples is a sequence of example inputs: write more_examples=[…]")
    moving = find_moving_buffers(module, moving_buffers)
    examples = [example_arguments(module, inputs, kwargs) for inputs in (example_inputs, *more_examples)]
    for tensor in tree_leaves(examples):
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
            raise InputError(f"an example input is empty, of shape {tuple(tensor.shape)}: nothing flows through it")
    with plain_kernels(), torch.no_grad():
        programs = [_trace(module, args, named) for args, named in examples]
        found, unused = _derive(module, programs, outputs, moving, rotate=kind == "orthogonal")
        del programs
        if not allow_unused:
            _refuse_unused(found, unused)
        if self_test:
            prove(module, found, examples, outputs=outputs, seed=seed)
    return found


def _trace(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    copy = private_copy(module)
    if _GROUPED not in RULES:
        use_experts(copy, "batched_mm")
    return export(copy, args, kwargs)


def _derive(
    module: torch.nn.Module,
    programs: Sequence[ExportedProgram],
    outputs: Outputs | None,
    moving: frozenset[str],
    rotate: bool,
) -> tuple[Symmetry, dict[str, torch.Tensor]]:
    """Return the axes that the programs have in common, and the tensors that none of them uses."""
    state = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)} & set(state)
    axes: dict[Hashable, Axes] = {}
    for name, tensor in state.items():
        own = _constant_axes(tensor, name) if name in buffers - moving else fresh(tensor.shape)
        axes.setdefault(identity(tensor), own)
    used: set[Hashable] = set()
    trace = Trace()
    for program in programs:
        used |= _walk(module, program, axes, trace, outputs)
    for cause, result in trace.outputs:
        pin(*result, cause=cause)
        with because(cause):
            pin_targets([result])
    with because("the example inputs, which do not use it"):
        pin(*(dim for key, own in axes.items() if key not in used for dim in own))
    pin_unreached(axes.values(), trace)
    with because("memory that it shares with another weight"):
        pin(*(dim for tensor in overlapping(state.values()) for dim in axes[identity(tensor)]))
    with because("its shape, which holds no numbers"):
        pin(*(dim for own in axes.values() if 0 in own.shape for dim in own))
    first: dict[Hashable, str] = {}
    aliases = {name: first[key] for name, t in state.items() if first.setdefault(key := identity(t), name) != name}
    found = emit({name: axes[identity(t)] for name, t in state.items()}, trace, buffers, aliases, rotate)
    return found, {name: tensor for name, tensor in state.items() if identity(tensor) not in used}


def _walk(
    module: torch.nn.Module,
    program: ExportedProgram,
    axes: Mapping[Hashable, Axes],
    trace: Trace,
    outputs: Outputs | None,
) -> set[Hashable]:
    """Learn the axes of the weights from one program; return the weights it uses."""
    constants = _constants(module, program)
    inputs: dict[str, Any] = {}
    weights: dict[str, Hashable] = {}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name, example = spec.arg.name, nodes[spec.arg.name].meta.get("val")
        tensor = constants.get(str(spec.target))
        if not isinstance(example, torch.Tensor):
            inputs[name] = example
        elif tensor is None:
            with because(f"the input {name!r}"):
                inputs[name] = fresh(example.shape, pinned=True)
        elif (key := identity(tensor)) in axes:
            inputs[name], weights[name] = axes[key], key
        else:
            inputs[name] = _constant_axes(tensor, str(spec.target))
    causes = keep_outputs(program, outputs)
    eliminate_dead(program.graph_module, weights)
    results = trace.run(program.graph_module, inputs)
    trace.outputs += [(cause, own) for cause, result in zip(causes, results, strict=True) for own in tensors(result)]
    return {key for name, key in weights.items() if nodes[name].users}


def _refuse_unused(found: Symmetry, unused: Mapping[str, torch.Tensor]) -> None:
    moved = {found.tensor_shape(name)[dim] for places in found.occurrences.values() for name, dim in places}
    # A flattened axis is a multiple of its units, a concatenated one a sum: neither is shorter than the units.
    least = min(moved, default=None)
    if least is None:
        return
    suspects = [n for n, t in unused.items() if t.is_floating_point() and max(t.shape, default=0) >= least]
    if suspects:
        shown = list_some([repr(name) for name in suspects], 3)
        raise InputError(
            f"the example inputs leave out weights that are wide enough to read units that move: {shown}; give "
            "more_examples that use them, or allow_unused=True if you do not need what they are for"
        )


def _constants(module: torch.nn.Module, program: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors of a program that are not its inputs, by name: parameters, buffers, and closures."""
    lifted = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {**lifted, **dict(chain(*named))}


def _constant_axes(tensor: torch.Tensor, name: str) -> Axes:
    """Return the axes of a tensor that is not a weight: free where its values are constant (a bias of zeros), else
    pinned.
    """

    def uniform(dim: int) -> bool:
        return not tensor.is_meta and bool((tensor == tensor.narrow(dim, 0, 1)).all())

    with because(f"the constant {name!r}"):
        if 0 in tensor.shape:
            return fresh(tensor.shape, pinned=True)
        axes = Axes(Dim(n, pinned=not uniform(d)) if n > 1 else ONE for d, n in enumerate(tensor.shape))
    if tensor.dtype == torch.int64 and tensor.dim() == 1 and not tensor.is_meta:
        return Positions.of(axes, tensor.tolist())
    return axes
