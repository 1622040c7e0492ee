"""A captured graph run without a compiler.

A decoding step changes ``q_offset`` alone. So what a graph computes from its other tensors is computed once, and again where
their values change.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from flexmask import _sync


class Replay:
    """Runs a captured graph, on tensors that have values. What does not depend on ``q_offset`` runs once, until the data changes.

    Args:
        module: the graph, of ATen operators.
        steps: whether the last tensor is ``q_offset``.
    """

    def __init__(self, module: GraphModule, *, steps: bool) -> None:
        self._whole = _with_torch_functions(module)
        parts = _split(module) if steps else None
        self._parts = parts and [_with_torch_functions(part) for part in parts]
        # What is computed from the data alone. Results may be views of the tensors that the stamp keeps.
        self._known: _sync.Stamped[Sequence[Any]] | None = None

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """The results of the graph. Those of two calls share no memory."""
        # Without the `_base` that a view has, on which dynamo guards: a copy from another process would be one more graph.
        return [found.detach() if isinstance(found, Tensor) else found for found in self._run(*tensors)]

    def _run(self, *tensors: Tensor) -> Any:
        if self._parts is None or not all(map(_sync.has_stamp, tensors)) or _is_recorded(tensors[-1]):
            return self._whole.forward(*tensors)
        before_steps, step = self._parts
        *data, offset = tensors
        known = self._known  # read once, as another thread may replace it
        if known is None or not known.stamp.holds(data):
            stamp = _sync.Stamp(data)
            self._known = known = _sync.Stamped(stamp, before_steps.forward(*stamp.kept))
        return step.forward(offset, *known.result)


def _is_recorded(tensor: Tensor) -> bool:
    """Whether kernels are recorded in a CUDA graph, which runs later with other values."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _split(module: GraphModule) -> tuple[GraphModule, GraphModule] | None:
    """A graph in two parts: what does not depend on its last tensor, and the rest, from that tensor and the results of the part.

    Tensors of the results and what is written in place belong to the rest, so that calls share no memory. None where some are
    views of inputs.
    """
    *data, last = module.graph.find_nodes(op="placeholder")
    nodes, rest = list(module.graph.nodes), {last}
    fresh: list[Any] = []
    for node in nodes:
        if node.op == "output":
            fresh += node.all_input_nodes
        elif isinstance(node.target, OpOverload):
            for place, argument in enumerate(node.target._schema.arguments):
                if argument.is_write:
                    fresh += [node, node.kwargs[argument.name] if argument.name in node.kwargs else node.args[place]]
    while fresh:
        node = fresh.pop()
        if isinstance(node.meta.get("val"), int | torch.SymInt):  # a size
            continue
        if node.op != "call_function":
            return None
        rest.add(node)
        fresh += [node.args[0]] if _is_view(node) else []
    for node in nodes:
        if not rest.isdisjoint(node.all_input_nodes):
            rest.add(node)
    carried = [node for node in nodes if node not in rest and not rest.isdisjoint(node.users)]
    computed = [node for node in nodes if node.op not in ("placeholder", "output")]
    first = _part(data, [node for node in computed if node not in rest], carried)
    second = _part([last, *carried], [node for node in computed if node in rest], nodes[-1].args[0])
    return GraphModule(module, first), GraphModule(module, second)


def _is_view(node: Node) -> bool:
    """Whether the result of a node shares the memory of its first argument."""
    if node.target in (getitem, torch.ops.aten._unsafe_view.default):  # whose schemas do not say so
        return True
    return isinstance(node.target, OpOverload) and any(result.alias_info for result in node.target._schema.returns)


def _part(inputs: Sequence[Node], nodes: Sequence[Node], results: Any) -> Graph:
    """The graph of some nodes, from inputs to results."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(results, copies.__getitem__))
    return graph


def _with_torch_functions(module: GraphModule) -> GraphModule:
    """The graph with torch's own functions and methods, which parse arguments faster than operators do."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            name = node.target.overloadpacket.__name__.removeprefix("sym_")  # such as sym_size
            function = getattr(torch._C._VariableFunctions, name, None)
            if function is not None and getattr(torch, name, None) == function:
                node.target = getattr(torch, name)
            elif not (node.args and isinstance(node.args[0], Node)):
                continue  # of a number, which has no methods
            elif hasattr(torch._C.TensorBase, name):
                node.op, node.target = "call_method", name
            elif name == "_to_copy" and node.kwargs.keys() == {"dtype"}:
                node.op, node.target, node.kwargs = "call_method", "to", {**node.kwargs, "copy": True}
    return GraphModule(module, graph)
