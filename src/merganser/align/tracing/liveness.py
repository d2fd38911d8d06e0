"""Remove the parts of a program that do not affect the outputs that count, so that they do not pin units."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_unflatten

from merganser.align.outputs import Outputs, choose, names
from merganser.errors import InputError


def keep_outputs(program: torch.export.ExportedProgram, outputs: Outputs | None) -> list[str]:
    """Restrict the outputs of a program to the chosen ones and the buffers it writes; return their descriptions."""
    output = program.graph.output_node()
    every = list(zip(program.graph_signature.output_specs, output.args[0], strict=True))
    nodes = [node for spec, node in every if spec.kind is OutputKind.USER_OUTPUT]
    written = {node: spec.target for spec, node in every if spec.kind is not OutputKind.USER_OUTPUT}
    stand_ins = [_stand_in(node) for node in nodes]
    returned = tree_unflatten(stand_ins, program.call_spec.out_spec)
    positions = {id(value): place for place, value in enumerate(stand_ins) if isinstance(value, torch.Tensor)}
    named = {id(value): name for name, value in names(returned)}
    kept: dict[int, str] = {}
    for value in choose(returned, outputs):
        if id(value) not in positions:
            raise InputError(
                "the function given as outputs must return tensors of what the module returns as they are: "
                "it chooses and does not compute"
            )
        name = named.get(id(value))
        kept[positions[id(value)]] = f"the output {name!r}" if name else "the output"
    output.args = ((*written, *(nodes[place] for place in kept)),)
    return [*(f"the buffer {target!r}, which a forward pass writes" for target in written.values()), *kept.values()]


def _stand_in(node: object) -> object:
    """Return a tensor without values for every tensor that a program returns."""
    value = node.meta.get("val") if isinstance(node, Node) else node
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def eliminate_dead(module: GraphModule, weights: Iterable[str] = ()) -> None:
    """Remove operations without an effect on the outputs of a graph.

    `weights` names placeholders of weights. The first use of one that nothing else uses is kept: a head that is
    computed and not returned must move with the units it reads.
    """
    nodes = list(module.graph.nodes)
    live = _ancestors(node for node in nodes if node.op == "output" or _writes(module, node))
    orphans = {node for node in nodes if node.op == "placeholder" and node.name in set(weights) and node not in live}
    live |= _ancestors(user for node in orphans for user in node.users)
    for node in reversed(nodes):
        if node not in live and node.op != "placeholder":
            module.graph.erase_node(node)
    for inner in _inner_graphs(module):
        eliminate_dead(inner)


def _ancestors(roots: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(roots)
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _writes(module: GraphModule, node: Node) -> bool:
    """Return whether an operation changes one of its arguments, or a region contains one that does."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    regions = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
    graphs = [getattr(module, str(region.target), None) for region in regions]
    return any(_writes(g, inner) for g in graphs if isinstance(g, GraphModule) for inner in g.graph.nodes)


def _inner_graphs(module: GraphModule) -> list[GraphModule]:
    paths = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    found = [getattr(module, path, None) for path in dict.fromkeys(paths)]
    return [inner for inner in found if isinstance(inner, GraphModule)]
