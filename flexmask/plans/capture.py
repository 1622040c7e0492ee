"""Lowerings captured as graphs of ATen operators: functions of a mask's tensors, without the analysis of the mask.

How a mask is lowered depends on its structure and on shapes alone where no value is read. So one graph serves all values. It runs
as it is, compiled by Inductor, or as a part of a graph that ``torch.compile`` makes of a model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock, RLock
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexmask._transforms import are_ints, is_observed
from flexmask.errors import LoweringError
from flexmask.expr.deferred import in_graph
from flexmask.expr.mask import And, Compare, Mask
from flexmask.expr.tables import Lookup
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.intervals.runs import within_true
from flexmask.lowering.block_mask import MAX_GRID, block_count
from flexmask.lowering.dense import cell_evaluator
from flexmask.plans.lowered import MAX_CELLS, LoweredMask, band_of, flat_lists, lists_of
from flexmask.plans.replay import Replay


class Setting(NamedTuple):
    """What a graph is captured for, next to the mask and the shapes of its tensors.

    Attributes:
        q_len: number of queries.
        kv_len: number of keys.
        batch: sequences; 0 where the mask's data has them.
        heads: heads; 0 where the mask has them.
        q_offset: position of the first query; -1 where it is the last tensor.
        device: where results are made.
        block_size: queries and keys in a block of the BlockMask; (0, 0) for no BlockMask.
    """

    q_len: int
    kv_len: int
    batch: int
    heads: int
    q_offset: int
    device: torch.device
    block_size: tuple[int, int]


@dataclass(eq=False)
class Graph:
    """A captured lowering.

    Attributes:
        module: from the tensors of the mask, those of its parameters in the order of their names, and ``q_offset`` where it is a
            tensor, to the tensors of a LoweredMask.
        layout: of the LoweredMask what is not tensors: its sizes, and what :meth:`LoweredMask.unflatten` takes with them.
        setting: what it was captured for.
    """

    module: torch.fx.GraphModule
    layout: Any
    setting: Setting
    _compiled: Callable[..., Any] | None = field(default=None)
    _replay: Replay | None = field(default=None)

    def run(self, tensors: Sequence[Tensor], *, compiled: bool = False) -> LoweredMask:
        """The LoweredMask of some tensors, which have the shapes, dtypes and device that the graph was captured for."""
        tensors = [tensor.contiguous() for tensor in tensors]
        run: Callable[..., Any]
        if compiled:
            if self._compiled is None:  # without the guards of torch.compile, which take as long as a short mask does
                options = {"cpp_wrapper": self.setting.device.type == "cpu"}  # calls kernels from C++: half of the time
                self._compiled = torch._inductor.compile(self.module, list(tensors), options=options)
            run = self._compiled
        elif is_observed(torch.empty(0, device="cpu")):
            run = self.module.forward
        else:
            if self._replay is None:
                self._replay = Replay(self.module, steps=self.setting.q_offset < 0)
            run = self._replay
        try:
            sizes, context = self.layout
            return LoweredMask.unflatten([*sizes, run(*tensors)], context)
        except (RuntimeError, IndexError) as error:
            if type(error) not in (RuntimeError, IndexError):  # such as torch.OutOfMemoryError
                raise
            is_short = "out of bounds" in str(error)
            hint = ": the mask's data ends before the queries do, at q_offset + q_len, or before the keys" if is_short else ""
            raise LoweringError(f"{error}{hint}") from error  # values that contradict each other or the lengths


class GraphCache:
    """Graphs by the form of the mask, the setting, and the shapes and dtypes of the tensors; the last used ones are kept.

    Attributes:
        size: how many graphs are kept.
        captures: how many were captured.
    """

    def __init__(self, size: int = 256) -> None:
        self.size, self.captures = size, 0
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drops all graphs."""
        with self._lock:
            self._graphs.clear()

    def get(self, mask: Mask, names: tuple[str, ...], setting: Setting, tensors: Sequence[Tensor]) -> Graph:
        """The graph for the form of a mask and the shapes of tensors, captured where there is none yet.

        Args:
            mask: the mask, or one that differs from it in its tensors alone.
            names: the parameters of the mask.
            setting: the lengths and sizes.
            tensors: the tensors of the mask, the value of each parameter, and ``q_offset`` where it is a tensor.
        """
        key = mask.form.digest, names, setting, tuple((_shape(tensor), tensor.dtype, tensor.device) for tensor in tensors)
        with self._lock:
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
                return graph
        graph = _capture(mask, names, setting, tensors)  # without the lock, so that threads whose graphs exist go on
        with self._lock:
            self.captures += 1
            graph = self._graphs.setdefault(key, graph)  # that of another thread, if it was faster
            while len(self._graphs) > self.size:
                self._graphs.popitem(last=False)
            return graph


#: The graphs of this process.
GRAPHS = GraphCache()


def run_graph(
    mask: Mask, names: tuple[str, ...], setting: Setting, tensors: Sequence[Tensor], *, compiled: bool = False
) -> LoweredMask:
    """A mask lowered by its graph, which is captured where there is none yet; see :meth:`GraphCache.get`.

    Raises:
        LoweringError: the mask has no graph, or values that contradict each other or the lengths.
    """
    graph = GRAPHS.get(mask, names, setting, tensors)
    try:
        return graph.run(tensors, compiled=compiled)
    except LoweringError:
        bound(mask, names, setting, tensors)  # whose error has the values, which a graph does not
        raise


def bound(mask: Mask, names: tuple[str, ...], setting: Setting, tensors: Sequence[Tensor]) -> Context:
    """The lowering context of a mask with some tensors."""
    own = len(mask.held)
    whole = mask.with_tensors(tensors[:own])
    if names:
        whole = whole.bind(**dict(zip(names, tensors[own:], strict=False)))
    offset = tensors[-1] if setting.q_offset < 0 else setting.q_offset
    batch, heads = (None if are_ints(size) and not size else size for size in (setting.batch, setting.heads))
    return bind(whole, setting.q_len, setting.kv_len, batch, heads, offset, setting.device)


def lower(context: Context, block_size: tuple[int, int]) -> LoweredMask:
    """The mask of a lowering context as one value, with the lists of its BlockMask where they need no host sync."""
    bounds = analyze(context)
    shape = context.full_batch, context.heads, context.q_len, context.kv_len
    by_keys = None if bounds.exact else _bounds_and_keys(context)
    rows, cells = by_keys or (bounds.upper, None)
    if not bounds.exact and cells is None:
        count = context.batch * context.heads * context.q_len * context.kv_len
        if count > MAX_CELLS:
            raise LoweringError(
                f"a part of {context.mask.brief()} is not separable in q and kv, so a plan evaluates all {count} cells; at most "
                f"{MAX_CELLS} are possible. {_remedy(context.mask)}"
            )
        cells = cell_evaluator(context)(0, context.q_len, 0, context.kv_len)
    # The ends of each slot lie together, as the mask_mod of a BlockMask reads them.
    ends = _in_memory(torch.stack((rows.lo.movedim(-1, 0), rows.hi.movedim(-1, 0)))).permute(2, 3, 4, 1, 0)
    lo, hi = ends.unbind(-1)
    rows, cells = Rows(lo, hi, rows.kv_len), None if cells is None else _in_memory(cells)
    lists: tuple[Tensor, ...] = ()
    if block_size[0] and block_count(context, block_size) <= MAX_GRID.elsewhere:
        lists = flat_lists(lists_of(context, rows, cells, block_size))
    # Of the mask without its lengths: a graph serves others, also those at which it would be plain causal.
    return LoweredMask(shape, ends, cells, block_size, lists, band_of(context.mask, context.q_offset))


def _in_memory(tensor: Tensor) -> Tensor:
    """The tensor as a view by strides, which Inductor writes to memory.

    It repeats other operations in the code that reads their result. It fails to do so in a ``mask_mod`` on CUDA where they join
    tensors, and in joined tensors where they limit positions.
    """
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.shape, tensor.stride())


def _bounds_and_keys(context: Context) -> tuple[Rows, Tensor] | None:
    """A conjunction as key intervals of the parts that depend on the query, and the keys that the other parts show.

    Returns:
        The intervals, which begin and end with such a key, and the keys, ``bool[B', H', 1, kv_len]``. None where all parts
        depend on the query, or those that do have more key intervals than are listed, so that each cell is evaluated.
    """
    mask = context.mask
    operands = mask.operands if isinstance(mask, And) else (mask,)
    of_keys = tuple(operand for operand in operands if "q" not in operand.symbols)
    others = tuple(operand for operand in operands if "q" in operand.symbols)
    if not of_keys:
        return None
    bounds = analyze(replace(context, mask=And.make(others)))
    if not bounds.exact:
        return None
    keys = cell_evaluator(replace(context, mask=And.make(of_keys)))(0, 1, 0, context.kv_len)
    return within_true(bounds.upper, keys.squeeze(2)), keys


def _remedy(mask: Mask) -> str:
    """What to write for a mask that has too many cells for a plan."""
    each_step = "all mask.block_mask() at each step instead"
    compared = (node for node in mask.walk() if isinstance(node, Compare) and node.sign == "==")
    if any(isinstance(node.left, Lookup) and isinstance(node.right, Lookup) for node in compared):
        return (
            "Where the tokens of each document are contiguous, write document(ids, contiguous=True), or give its lengths= or "
            f"cu_seqlens=; otherwise c{each_step}"
        )
    return f"C{each_step}"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The sizes as numbers."""
    return tuple(map(int, tensor.shape))


#: Held by the thread that captures: torch.fx has state of the whole process, so that two captures at a time fail.
_CAPTURING = Lock()


def _capture(mask: Mask, names: tuple[str, ...], setting: Setting, tensors: Sequence[Tensor]) -> Graph:
    layout: Any = None

    def lowered(*inputs: Tensor) -> list[Tensor]:
        nonlocal layout
        (*sizes, flat), context = lower(bound(mask, names, setting, inputs), setting.block_size).flatten()
        layout = sizes, context
        return cast("list[Tensor]", flat)

    def capture() -> torch.fx.GraphModule:
        examples = [torch.empty(_shape(tensor), dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
        with _CAPTURING:
            graph = make_fx(lowered, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        _drop_identities(graph.graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph

    if torch.__version__ < "2.12":  # where a CUDA build without a GPU keeps a pointer into the first thread that does this
        torch._C._ensureCUDADeviceGuardSet()
    with ThreadPoolExecutor(1) as thread:  # in which no mode and no transform of the caller is active
        return Graph(thread.submit(capture).result(), layout, setting)


def _drop_identities(graph: torch.fx.Graph) -> None:
    """Drops views that are a tensor as it is, e.g. expanded to the sizes that it has, or with an axis added and taken away."""
    aten = torch.ops.aten
    views = {aten.expand.default, aten.view.default, aten.slice.Tensor, aten.squeeze.dim, aten.unsqueeze.default}
    for node in graph.nodes:
        source = node
        while source.target in views:
            source = source.args[0]
            if _place(source) == _place(node):
                node.replace_all_uses_with(source)
                break


def _place(node: torch.fx.Node) -> tuple[Any, ...]:
    """The part of its memory that a tensor is."""
    seen = node.meta["val"]
    return seen.shape, seen.stride(), seen.storage_offset()


def lower_in_graph(
    mask: Mask,
    query: Tensor,
    key: Tensor,
    q_offset: int | Tensor = 0,
    block_size: tuple[int, int] = (128, 128),
) -> LoweredMask:
    """A mask lowered in code that ``torch.compile`` traces: the lowering becomes a part of the whole graph.

    Args:
        mask: the mask.
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.
        q_offset: position of the first query.
        block_size: see :class:`Setting`.
    """
    offset, values = (-1, (q_offset,)) if isinstance(q_offset, Tensor) else (q_offset, ())
    setting = (query.shape[2], key.shape[2], query.shape[0], query.shape[1], offset, query.device, block_size)
    from flexmask.plans.traced import lower_traced  # imports the compiler, which is already loaded here

    return lower_traced(in_graph(mask), (), setting, values)
