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

__all__ = ["Replay"]


class Replay:
    """The function of a captured graph, for tensors that have values.

    Args:
        module: the graph, of ATen operators.
        steps: whether the last tensor is ``q_offset``, which changes from step to step.
    """

    def __init__(self, module: GraphModule, *, steps: bool) -> None:
        self._whole = _bound(module)
        self._parts = [_bound(part) for part in _split(module)] if steps else None
        self._known: tuple[list[Any], Sequence[Any]] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        """The results of the graph, in memory of their own."""
        if self._parts is None or not all(map(_sync.has_data_version, tensors)):
            return self._whole.forward(*tensors)
        of_data, of_step = self._parts
        *data, offset = tensors
        known = self._known  # read once, as another thread may replace it
        if known is None or not all(map(_sync.is_unchanged, data, known[0])):
            self._known = known = [_sync.data_version(tensor) for tensor in data], of_data.forward(*data)
        return of_step.forward(offset, *known[1])


def _split(module: GraphModule) -> tuple[GraphModule, GraphModule]:
    """The part of a graph that does not depend on its last tensor, and the rest: from that tensor and the results of the part.

    Results of the graph and what it writes in place belong to the rest, so that calls share no memory.
    """
    *data, last = module.graph.find_nodes(op="placeholder")
    rest = {last}

    def add(node: Node) -> None:
        if node.op == "call_function":
            rest.add(node)
            if _is_view(node):
                add(node.args[0])  # type: ignore[arg-type]

    nodes = list(module.graph.nodes)
    for node in nodes:
        if node.op == "output":
            for result in node.all_input_nodes:
                add(result)
        elif isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            add(node)
            add(node.args[0])
    for node in nodes:
        if not rest.isdisjoint(node.all_input_nodes):
            rest.add(node)
    kept = [node for node in nodes if node not in rest and not rest.isdisjoint(node.users)]
    inner = [node for node in nodes if node.op not in ("placeholder", "output")]
    of_data = _part(data, [node for node in inner if node not in rest], kept)
    return (
        GraphModule(module, of_data),
        GraphModule(module, _part([last, *kept], [node for node in inner if node in rest], nodes[-1].args[0])),
    )


def _is_view(node: Node) -> bool:
    """Whether the result of a node shares the memory of its first argument."""
    if node.target is getitem:
        return True
    return isinstance(node.target, OpOverload) and any(result.alias_info for result in node.target._schema.returns)


def _part(inputs: Sequence[Node], nodes: Sequence[Node], results: Any) -> Graph:
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(results, copies.__getitem__))
    return graph


def _bound(module: GraphModule) -> GraphModule:
    """The graph with torch's own functions and methods, which parse arguments faster than operators do."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            name = node.target.overloadpacket.__name__
            function = getattr(torch._C._VariableFunctions, name, None)
            if function is not None and getattr(torch, name, None) == function:
                node.target = getattr(torch, name)
            elif hasattr(torch._C.TensorBase, name):
                node.op, node.target = "call_method", name
            elif name == "_to_copy" and node.kwargs.keys() == {"dtype"}:
                node.op, node.target, node.kwargs = "call_method", "to", {**node.kwargs, "copy": True}
    return GraphModule(module, graph)
