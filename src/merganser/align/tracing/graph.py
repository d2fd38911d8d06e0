"""Interpret an exported graph: every operation is applied to the axes of its tensors."""

from __future__ import annotations

import logging
import operator
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from merganser.align.tracing import rules as _rules  # noqa: F401  (fills the registry)
from merganser.align.tracing.calls import RULES, Call, OutputAxes, Unsupported
from merganser.align.tracing.dims import Axes, Dim, because, fresh, is_pinned, pin
from merganser.align.tracing.nesting import Forbidden
from merganser.align.tracing.rotations import Use
from merganser.align.tracing.routers import at_hand, follow, pin_targets
from merganser.align.tracing.rules.pointwise import pointwise

logger = logging.getLogger(__name__)

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "(.+)", line (\d+)')

_SILENT = {"_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_size"}
"""Operations without an effect on values."""

_CUTTING = {"select", "unbind", "slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split",
            "unsafe_chunk", "index", "index_select"}  # fmt: skip
"""Operations that leave out what is not in their result; every other one makes use of all it reads."""


@dataclass(slots=True)
class Trace:
    """The result of interpreting graphs: axes of every intermediate tensor, forbidden nestings, hints for names.

    `outputs` are the results of whole programs with their descriptions; `consumed` has the operands and results of
    operations that cut nothing.
    """

    values: list[Axes] = field(default_factory=list)
    outputs: list[tuple[str, Axes]] = field(default_factory=list)
    consumed: list[tuple[list[Axes], list[Axes]]] = field(default_factory=list)
    forbidden: list[Forbidden] = field(default_factory=list)
    hints: list[tuple[Dim, str]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)

    def run(self, module: GraphModule, inputs: Mapping[str, Any]) -> Any:
        """Interpret a graph on axes. `inputs` are by placeholder name; the result has the structure of the output."""
        env: dict[Node, Any] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = inputs[node.name]
            elif node.op == "get_attr":
                env[node] = self._attribute(module, str(node.target))
            elif node.op == "output":
                return _resolve(node.args[0], env)
            else:
                env[node] = self._call(node, env)
                self.values += [at_hand(axes) for axes in tensors(env[node]) if 0 not in axes.shape]
        return None

    def _attribute(self, module: GraphModule, path: str) -> Any:
        value = operator.attrgetter(path)(module)
        with because("a constant in the code of the module"):
            return fresh(value.shape, pinned=True) if isinstance(value, torch.Tensor) else value

    def _call(self, node: Node, env: Mapping[Node, Any]) -> Any:
        args, kwargs = _resolve(node.args, env), _resolve(node.kwargs, env)
        if node.target is operator.getitem:
            return args[0][args[1]] if isinstance(args[0], list | tuple) else None
        graphs = [i for i, value in enumerate(args) if isinstance(value, GraphModule)]
        if len(graphs) == 1:  # a region with gradients or autocast switched: its graph, then its inputs
            inner, given = args[graphs[0]], args[graphs[0] + 1 :]
            names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
            return self.run(inner, dict(zip(names, given, strict=True)))
        if isinstance(node.target, torch._ops.OpOverload):
            with because(f"the operation {_operator_name(node.target)}{location(node)}"):
                return self._operator(node, node.target, args, kwargs)
        return _pin_unknown(node, [*tensors(args), *tensors(kwargs)])

    def _operator(self, node: Node, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        op = _operator_name(target)
        if op in _SILENT:
            return None
        rule = RULES.get(op) or (pointwise if torch.Tag.pointwise in target.tags else None)
        shapes = _shapes(node)
        arguments = {
            a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value)
            for i, a in enumerate(target._schema.arguments)
        }
        if shapes and all(0 in shape for shape in shapes):  # it has no data
            return _pin_all(node)
        call = Call(op, arguments, shapes, self.forbidden, self.hints, self.consumed)
        if rule is None or not shapes:
            return _pin_unknown(node, call.tensors)
        try:
            result = rule(call)
            if tuple(axes.shape for axes in tensors(result)) != shapes:
                raise Unsupported
            result = follow(call, result, in_place=target._schema.is_mutable)
        except (Unsupported, LookupError, TypeError, ValueError):  # an overload the rule was not written for
            return _pin_unknown(node, call.tensors)
        self.uses.append(Use(node, op, arguments, call.tensors, tensors(result)))
        if op not in _CUTTING:
            self.consumed.append((call.tensors, tensors(result)))
        return result


def _pin_unknown(node: Node, touched: Iterable[Axes]) -> OutputAxes | None:
    """Pin everything that an unknown operation reads and returns."""
    touched = list(touched)
    if not all(is_pinned(dim) for axes in touched for dim in axes):
        logger.info("unknown operation %s pins its operands%s", node.target, location(node))
    with because(f"the operation {node.target}, for which there is no rule{location(node)}"):
        pin(*(dim for axes in touched for dim in axes))
        pin_targets(touched)
        return _pin_all(node)


def _operator_name(target: torch._ops.OpOverload) -> str:
    """Return the name of an ATen operator without overload and underscore; of another one with its namespace."""
    namespace, name = target._schema.name.split("::")
    return name.rstrip("_") if namespace == "aten" else f"{namespace}::{name}"


def _pin_all(node: Node) -> OutputAxes | None:
    results = [fresh(shape, pinned=True) for shape in _shapes(node)]
    if isinstance(node.meta.get("val"), torch.Tensor):
        return results[0]
    return results or None


def location(node: Node) -> str:
    """Return `" at file:line"` of the innermost code behind a node that is not PyTorch's, if known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    found = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    if not found:
        return ""
    path, line = found[-1]
    package = max((entry for entry in sys.path if entry and path.startswith(entry)), key=len, default="")
    return f" at {path.removeprefix(package).lstrip('/')}:{line}"


def _shapes(node: Node) -> tuple[tuple[int, ...], ...]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(tuple(map(int, v.shape)) for v in values if isinstance(v, torch.Tensor))


def _resolve(value: Any, env: Mapping[Node, Any]) -> Any:
    if isinstance(value, Node):
        return env[value]
    if isinstance(value, list | tuple):
        return [_resolve(v, env) for v in value]
    if isinstance(value, dict):
        return {k: _resolve(v, env) for k, v in value.items()}
    return value


def tensors(value: Any) -> list[Axes]:
    """Return every traced tensor in a structure."""
    if isinstance(value, Axes):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [axes for v in value for axes in tensors(v)] if isinstance(value, list | tuple) else []
