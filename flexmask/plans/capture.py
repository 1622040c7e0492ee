"""Lowerings captured as graphs of ATen operators: functions of a mask's tensors, without the analysis of the mask.

How a mask is lowered depends on its structure and on shapes alone where no value is read. So one graph serves all values. It runs
as it is, compiled by Inductor, or as a part of a graph that ``torch.compile`` makes of a model.

Sizes are numbers in a graph, or symbols, which its inputs give values: then it serves all sizes on which torch's guards hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from flexmask._transforms import are_ints, is_observed
from flexmask.errors import FlexmaskError, LoweringError
from flexmask.expr.deferred import in_graph
from flexmask.expr.mask import And, Compare, Mask, operands_of
from flexmask.expr.tables import Lookup
from flexmask.intervals.bands import band_of
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.columns import within_true
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.block_mask import MAX_GRID, block_count
from flexmask.lowering.dense import cell_evaluator
from flexmask.lowering.ends import in_memory
from flexmask.lowering.triton import classes
from flexmask.plans.lowered import MAX_CELLS, LoweredMask, flat_lists
from flexmask.plans.replay import Replay

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


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


#: The shapes of the inputs of a graph.
Sizes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Graph:
    """A captured lowering.

    Attributes:
        module: from an empty tensor ``[0, q_len, kv_len, q_blocks, kv_blocks]``, the tensors of the mask, those of its parameters
            in the order of their names, and ``q_offset`` where it is a tensor, to four sizes and the tensors of a LoweredMask.
            A graph for one size of each input takes no such empty tensor, and gives no sizes.
        layout: what :meth:`LoweredMask.unflatten` takes with its results.
        shape: the four sizes, of a graph for one size of each input; empty otherwise.
        compute: the module as it runs.
        serves: whether it is a graph for some sizes.
    """

    module: torch.fx.GraphModule
    layout: Any
    shape: tuple[int, ...]
    compute: Callable[..., Any]
    serves: Callable[[Sizes], bool]

    def run(self, setting: Setting, tensors: Sequence[Tensor]) -> LoweredMask:
        """The LoweredMask of some lengths and tensors, which have the dtypes and device that the graph was captured for."""
        lengths = [] if self.shape else [_with_shape(_lengths(setting))]
        run = self.module.forward if is_observed(*tensors) else self.compute
        found = run(*lengths, *[tensor.contiguous() for tensor in tensors])
        return LoweredMask.unflatten((*self.shape, *found), self.layout)


#: The most graphs for sizes that vary. Where a mask needs more, as one whose longer rows have more key intervals, each further
#: length has a graph of its own.
MOST_VARYING = 4


class GraphCache:
    """Graphs by the form of the mask, the setting, and the shapes and dtypes of the tensors; the last used ones are kept.

    Attributes:
        size: how many graphs are kept; those for sizes that vary count as one.
        captures: how many were captured.
    """

    def __init__(self, size: int = 256) -> None:
        self.size, self.captures = size, 0
        self._graphs: OrderedDict[Any, list[Graph]] = OrderedDict()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drops all graphs."""
        with self._lock:
            self._graphs.clear()

    def get(
        self, mask: Mask, setting: Setting, tensors: Sequence[Tensor], *, varies: bool = False, compiled: bool = False
    ) -> Graph:
        """The graph for the form of a mask and the shapes of tensors, captured where there is none yet.

        Args:
            mask: the mask, or one that differs from it in its tensors alone.
            setting: the lengths and sizes.
            tensors: the tensors of the mask, the value of each parameter, and ``q_offset`` where it is a tensor.
            varies: whether the graph serves other lengths and shapes too, where it can.
            compiled: whether Inductor compiles it.
        """
        sizes = _sizes(setting, tensors)
        kind = tuple([tuple([min(size, 2) for size in shape]) for shape in sizes]) if varies else sizes
        inputs = tuple((tensor.dtype, tensor.device) for tensor in tensors)
        key = mask.form.digest, setting[2:], inputs, kind, varies, compiled
        graphs, graph = self._kept(key, sizes)
        if graph is not None:
            return graph
        if len(graphs) == MOST_VARYING:
            return self.get(mask, setting, tensors, compiled=compiled)
        made = _capture(mask, setting, tensors, varies=varies, compiled=compiled)  # without the lock: other threads go on
        with self._lock:
            self.captures += 1
            graphs, graph = self._kept(key, sizes)
            if graph is None:  # else that of another thread, which was faster
                graphs.append(graph := made)
            while len(self._graphs) > self.size:
                self._graphs.popitem(last=False)
            return graph

    def _kept(self, key: Any, sizes: Sizes) -> tuple[list[Graph], Graph | None]:
        """The graphs of a key, and the one that serves some sizes."""
        with self._lock:
            graphs = self._graphs.setdefault(key, [])
            self._graphs.move_to_end(key)
            return graphs, next((graph for graph in graphs if graph.serves(sizes)), None)


#: The graphs of this process.
GRAPHS = GraphCache()


def run_graph(mask: Mask, setting: Setting, tensors: Sequence[Tensor], **options: bool) -> LoweredMask:
    """A mask lowered by its graph, which is captured where there is none yet; see :meth:`GraphCache.get`.

    Raises:
        LoweringError: the mask has no graph, or values that contradict each other or the lengths.
    """
    graph = GRAPHS.get(mask, setting, tensors, **options)
    try:
        return graph.run(setting, tensors)
    except (RuntimeError, IndexError) as error:
        if type(error) not in (RuntimeError, IndexError):  # such as torch.OutOfMemoryError
            raise
        bound(mask, setting, tensors)  # whose error has the values, which a graph does not
        is_short = "out of bounds" in str(error)
        hint = ": the mask's data ends before the queries do, at q_offset + q_len, or before the keys" if is_short else ""
        raise LoweringError(f"{error}{hint}") from error


def bound(mask: Mask, setting: Setting, tensors: Sequence[Tensor]) -> Context:
    """The lowering context of a mask with some tensors: its own, the value of each parameter, and ``q_offset``."""
    own = len(mask.held)
    whole, values = mask.with_tensors(tensors[:own]), list(tensors[own:])
    offset = values.pop() if setting.q_offset < 0 else setting.q_offset
    if mask.params:
        whole = whole.bind(**dict(zip(mask.params, values, strict=False)))
    return context_of(whole, setting, offset)


def context_of(mask: Mask, setting: Setting, q_offset: int | Tensor) -> Context:
    """The lowering context of a mask at the lengths and sizes of a setting, whose ``q_offset`` is not used."""
    batch, heads = (None if are_ints(size) and not size else size for size in (setting.batch, setting.heads))
    return bind(mask, setting.q_len, setting.kv_len, batch, heads, q_offset, setting.device)


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
    ends = in_memory(torch.stack((rows.lo.movedim(-1, 0), rows.hi.movedim(-1, 0)))).permute(2, 3, 4, 1, 0)
    lo, hi = ends.unbind(-1)
    rows, cells = Rows(lo, hi, rows.kv_len), None if cells is None else in_memory(cells)
    lists: tuple[Tensor, ...] = ()
    if block_size[0] and block_count(context, block_size) <= MAX_GRID.elsewhere:
        lists = flat_lists(context, rows, cells, block_size)
    of_class = tuple(map(in_memory, classes(context, rows))) if cells is None else ()
    # Of the mask without its lengths: a graph serves others, also those at which it would be plain causal.
    return LoweredMask(shape, ends, cells, block_size, lists, band_of(context), of_class)


def _bounds_and_keys(context: Context) -> tuple[Rows, Tensor] | None:
    """A conjunction as key intervals of the parts that depend on the query, and the keys that the other parts show.

    Returns:
        The intervals, which begin and end with such a key, and the keys, ``bool[B', H', 1, kv_len]``. None where all parts
        depend on the query, or those that do have more key intervals than are listed, so that each cell is evaluated.
    """
    mask = context.mask
    operands = operands_of(mask)
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
    compared = (node for node in mask.walk() if isinstance(node, Compare) and node.sign == "==")
    if any(isinstance(node.left, Lookup) and isinstance(node.right, Lookup) for node in compared):
        return (
            "Where the tokens of each document are contiguous, write document(ids, contiguous=True), or give its lengths= or "
            "cu_seqlens=; otherwise call mask.block_mask() at each step instead"
        )
    return "Call mask.block_mask() at each step instead"


def _sizes(setting: Setting, tensors: Sequence[Tensor]) -> Sizes:
    """The shapes of the inputs of a graph, as numbers."""
    return _lengths(setting), *[tuple(map(int, tensor.shape)) for tensor in tensors]


def _lengths(setting: Setting) -> tuple[int, ...]:
    """The shape of the first input: the lengths, and the numbers of blocks, which kernels would compute at each index."""
    lengths = setting.q_len, setting.kv_len
    return 0, *lengths, *(-(-length // size) for length, size in zip(lengths, setting.block_size, strict=True))


def _with_shape(shape: Sequence[Any]) -> Tensor:
    """An empty tensor without strides, whose products overflow for long masks."""
    return torch.empty((), device="cpu").expand(shape)


#: Held by the thread that captures: torch.fx has state of the whole process, so that two captures at a time fail.
_CAPTURING = Lock()


def _capture(mask: Mask, setting: Setting, tensors: Sequence[Tensor], *, varies: bool = False, compiled: bool = False) -> Graph:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # of the compiler, as what it imports

    given = mask, setting, tensors
    env = ShapeEnv(duck_shape=False)  # sizes that are equal may differ in the next call
    sizes = _sizes(setting, tensors)
    shapes = _symbols(sizes, env) if varies else sizes
    if torch.__version__ < "2.12":  # where a CUDA build without a GPU keeps a pointer into the first thread that does this
        torch._C._ensureCUDADeviceGuardSet()
    try:
        with ThreadPoolExecutor(1) as thread:  # in which no mode and no transform of the caller is active
            module, layout, shape, inputs = thread.submit(_traced, *given, shapes, env).result()
    except FlexmaskError:
        if not varies:
            raise
        return _capture(*given, varies=False, compiled=compiled)  # whose errors have the sizes
    compute: Callable[..., Any]
    if compiled:  # without the guards of torch.compile, which take as long as a short mask does
        options = {"cpp_wrapper": setting.device.type == "cpu"}  # calls kernels from C++: half of the time
        compute = torch._inductor.compile(module, inputs, options=options)
    else:
        compute = Replay(module, steps=setting.q_offset < 0)
    return Graph(module, layout, shape, compute, _guard(env, shapes) if varies else sizes.__eq__)


def _symbols(sizes: Sizes, env: ShapeEnv) -> Sequence[tuple[Any, ...]]:
    """A symbol for each size, which is taken for examples. 0 and 1 stay numbers, as torch has other graphs for these."""
    from torch._dynamo.source import ConstantSource

    def symbol(size: int, name: str) -> Any:
        if size < 2:
            return size
        source = ConstantSource(name)
        return env.create_symintnode(env.create_symbol(size, source), hint=size, source=source)

    return [tuple(symbol(size, f"size{place}_{axis}") for axis, size in enumerate(shape)) for place, shape in enumerate(sizes)]


def _guard(env: ShapeEnv, shapes: Sequence[tuple[Any, ...]]) -> Callable[[Sizes], bool]:
    """Whether what followed from the examples holds for other sizes, of which the same ones are less than 2."""
    symbols = [size for shape in shapes for size in shape if not are_ints(size)]
    code = cast(str, compile(env.produce_guards_expression(symbols) or "True", "<guards>", "eval"))
    return lambda sizes: env.evaluate_guards_expression(code, [size for shape in sizes for size in shape if size > 1])


def _traced(
    mask: Mask, setting: Setting, tensors: Sequence[Tensor], shapes: Sequence[tuple[Any, ...]], env: ShapeEnv
) -> tuple[torch.fx.GraphModule, Any, tuple[int, ...], list[Any]]:
    """The module, the layout and the shape of a :class:`Graph` for shapes that may be symbols, and its example inputs."""
    layout, shape = None, ()
    are_numbers = all(are_ints(*own) for own in shapes)

    def lowered(*inputs: Tensor) -> list[Any]:
        nonlocal layout, shape
        _, q_len, kv_len, q_blocks, kv_blocks = shapes[0] if are_numbers else inputs[0].shape
        context = bound(mask, setting._replace(q_len=q_len, kv_len=kv_len), inputs if are_numbers else inputs[1:])
        found, layout = lower(replace(context, blocks={setting.block_size: (q_blocks, kv_blocks)}), setting.block_size).flatten()
        if are_numbers:
            shape, found = tuple(found[:4]), found[4:]
        return found

    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    cache = nullcontext() if are_numbers else disable_fake_tensor_cache(mode)  # whose keys take half of the time with symbols
    with _CAPTURING, mode, cache, _use_lazy_graph_module(True):  # writes code for the graph that runs, for no other
        inputs = [] if are_numbers else [_with_shape(shapes[0])]
        inputs += [torch.empty(shape, dtype=own.dtype, device=own.device) for shape, own in zip(shapes[1:], tensors, strict=True)]
        graph_of = make_fx(lowered, tracing_mode="fake" if are_numbers else "symbolic", _allow_non_fake_inputs=True)
        module = graph_of(*inputs)
    _place_constants(module)
    _drop_identities(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module, layout, shape, inputs


def _place_constants(module: torch.fx.GraphModule) -> None:
    """Copies constants, as the lists of a mask are, to the device once rather than in each run."""
    aten = torch.ops.aten
    for fresh in module.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        (constant,), users = fresh.all_input_nodes, list(fresh.users)
        copied = users[0] if len(users) == 1 else fresh  # one of several may write to it
        if constant.op == "get_attr" and copied.target is aten._to_copy.default:
            name = f"{copied.name}_constant"
            module.register_buffer(name, copied.target(getattr(module, cast(str, constant.target)), **copied.kwargs))
            with module.graph.inserting_before(copied):
                placed = module.graph.call_function(aten.clone.default, (module.graph.get_attr(name),))  # each run has its own
            placed.meta = copied.meta
            copied.replace_all_uses_with(placed)


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
    """The part of its memory that a tensor is. Symbols are compared as expressions, since a comparison of theirs is a guard."""
    seen = node.meta["val"]
    numbers = *seen.shape, *seen.stride(), seen.storage_offset()
    return tuple(number if are_ints(number) else number.node.expr for number in numbers)


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
    from flexmask.plans.traced import lower_traced  # imports the compiler, which is already loaded here

    sizes = query.shape[2], key.shape[2], query.shape[0], query.shape[1]
    return lower_traced(in_graph(mask), sizes, q_offset, query.device, block_size)
