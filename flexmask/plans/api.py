"""A mask as a function of its data, at some lengths or at all, from which a captured graph lowers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._checks import check_flag, check_plain, checked_int, names_explained
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.data import as_table
from flexmask.expr.deferral import refuse_traced
from flexmask.expr.deferred import in_graph
from flexmask.expr.mask import Mask
from flexmask.expr.methods import EQUIVALENTS_OF_PLAN
from flexmask.intervals.bind import MAX_OFFSET
from flexmask.intervals.sizes import checked_size, own_sizes
from flexmask.lowering.block_mask import block_sizes
from flexmask.lowering.mask_mod import MaskMod
from flexmask.plans.capture import Setting, run_graph
from flexmask.plans.lowered import LoweredMask
from flexmask.tracing.trace import MaskLike, as_mask


class Plan:
    """A mask as a function of its data: ``plan(lengths=lengths)`` gives a LoweredMask. :func:`plan` makes it.

    The first call captures the lowering as a graph, in about a second. Later calls run the graph, with no analysis and no host
    sync. Data of other shapes has another graph, unless the plan was made without lengths: see :func:`plan`. With a tensor
    ``q_offset``, what the data alone decides is computed again only where its values change; the plan keeps a copy of the data
    to notice that. In code that ``torch.compile`` traces, the graph becomes a part of the model's graph.

    Attributes:
        mask: the mask, with its parameters; of a ``mask_mod`` as it was traced last.
        setting: the lengths and sizes; lengths are 0 where each call gives them.
        compile: whether Inductor compiles the graph.
        follows: whether a call lowers the mask on the device of its data.
    """

    def __init__(
        self, mask: Mask, setting: Setting, *, compile: bool = False, follows: bool = False, mask_mod: MaskMod | None = None
    ) -> None:
        self.mask, self.setting, self.compile, self.follows = mask, setting, compile, follows
        self._names, self._mask_mod = mask.params, mask_mod
        self._text = mask.brief()  # which dynamo cannot follow

    def __call__(self, /, *lengths: int, q_offset: int | Tensor = 0, **data: Any) -> LoweredMask:
        """Lowers the mask with some data.

        On the CPU, data that contradicts itself or the lengths is an error. Elsewhere values are not read, apart from what the
        mask promises of them, such as ``document(contiguous=True)``.

        Args:
            lengths: ``q_len``, and ``kv_len`` where it differs, of a plan that was made without them.
            q_offset: position of the first query, an int or an integer tensor ``[B]``.
            data: the value of each parameter of the mask: a tensor, on the device of the plan where it was given one; numbers and
                lists are copied to the device.

        Returns:
            The mask to give to :func:`flexmask.attention` in each layer of a model.

        Raises:
            ExpressionError: a parameter that the mask does not have, or one that is not given.
            LoweringError: data that contradicts the lengths, data on another device or on several, or a mask that is not
                separable in q and kv and has too many cells.
            OperandError: data of a wrong type, or without its name; lengths of a plan that has them, or none.
        """
        setting = self._at(*lengths)
        if data.keys() != set(self._names):
            raise ExpressionError(self._wrong_names(set(data)))
        if self.follows:
            tensors = (value for value in (*data.values(), q_offset) if isinstance(value, Tensor))
            setting = setting._replace(device=next((tensor.device for tensor in tensors), setting.device))
        given = {name: _tensor(data[name], name, setting.device) for name in self._names}
        values = [*given.values()]
        if not isinstance(q_offset, Tensor) and not torch.compiler.is_compiling():
            checked_int(q_offset, "q_offset", 0, MAX_OFFSET, LoweringError, "an int or an integer tensor [B]")
        if isinstance(q_offset, Tensor) or q_offset:
            values.append(_tensor(q_offset, "q_offset", setting.device))
            setting = setting._replace(q_offset=-1)
        if torch.compiler.is_compiling():
            from flexmask.plans.traced import lower_traced

            mask = self.mask.bind(**given) if given else self.mask
            offset = values[-1] if setting.q_offset else 0
            return lower_traced(in_graph(mask), setting[:4], offset, setting.device, setting.block_size)
        if self._mask_mod is not None:  # what it captures may be another tensor by now
            self.mask = as_mask(self._mask_mod, device=setting.device)
        inputs = [*self.mask.tensors, *values]
        try:
            return run_graph(self.mask, setting, inputs, varies=not self.setting.q_len, compiled=self.compile)
        except LoweringError as error:
            raise self._explained(error, given) from error

    def __repr__(self) -> str:
        given = {name: getattr(self.setting, name) for name in ("q_len", "kv_len", "batch", "heads", "block_size")}
        options = ", ".join(f"{name}={value}" for name, value in given.items() if value)
        device = None if self.follows else str(self.setting.device)
        return f"plan({str(self.mask)!r}, {options}, {device=}, compile={self.compile})"

    def _at(self, *lengths: int) -> Setting:
        """The setting with the lengths of a call."""
        if self.setting.q_len:
            if lengths:
                message = f"a plan takes its data by name; {self._call_text(self._names)}"
                raise OperandError(f"{message}. Its lengths are q_len={self.setting.q_len}, kv_len={self.setting.kv_len}")
            return self.setting
        if not 1 <= len(lengths) <= 2:
            call = ", ".join(["plan(q_len", *(f"{name}=..." for name in self._names)])
            raise OperandError(f"the plan was made without lengths, so each call begins with q_len, or q_len, kv_len: {call})")
        q_len, kv_len = _lengths(lengths[0], lengths[-1])
        return self.setting._replace(q_len=q_len, kv_len=kv_len)

    def _wrong_names(self, given: set[str]) -> str:
        unknown, missing = sorted(given - set(self._names)), sorted(set(self._names) - given)
        has = f"its parameters are {', '.join(self._names)}" if self._names else "it has no parameters"
        if unknown:
            return f"the mask {self._text} has no parameter {', '.join(unknown)}; {has}"
        return f"the mask {self._text} has parameters that are not given: {self._call_text(missing)}"

    def _call_text(self, names: Sequence[str]) -> str:
        if not names:
            return f"the mask {self._text} has no parameters, so call the plan with none"
        return f"call the plan with {', '.join(f'{name}=...' for name in names)}"

    def _explained(self, error: LoweringError, data: dict[str, Tensor]) -> LoweringError:
        """The error of a call; where the data has another batch than the plan, one that says so."""
        batch = self.setting.batch
        own = own_sizes(self.mask.bind(**data)).get("b", batch) if batch else batch
        if own == batch:
            return error
        return LoweringError(
            f"the plan is for batch={batch}, but the data is for batch={own}; a plan made without batch= takes that of its "
            "data. Data that serves every sequence has no batch axis"
        )


@names_explained(EQUIVALENTS_OF_PLAN)
def plan(
    mask: MaskLike,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str | None = None,
    block_size: int | tuple[int, int] = 128,
    compile: bool = False,
) -> Plan:
    """A mask analyzed once, to be lowered at each step from its data alone::

        plan = flexmask.plan("causal & document(cu_seqlens=cu)", q_len=8192, batch=4)
        for tokens, cu in batches:
            lowered = plan(cu=cu)
            ...
            out = flexmask.attention(query, key, value, lowered)  # in each layer

    For other functions ``lowered.block_mask`` is the BlockMask of torch's ``flex_attention``, ``lowered.dense()`` a tensor.

    Where lengths change from step to step, leave them out here, and begin each call with them: ``plan(q_len, cu=cu)``, or
    ``plan(q_len, kv_len, cu=cu)``. One graph serves all lengths, batch sizes and numbers of documents. There is another, as torch
    has, where a size is 1, for lengths of one block, for as many blocks of keys as of queries, for more blocks than a graph
    lists, and for a ``q_offset``. A mask whose longer rows have more key intervals, such as ``kv % 3 == 0``, has one for each
    length. A call takes 1.1 to 1.3 times the time of a plan with lengths, and the first capture four times.

    A plan for decoding is for one query and all places of the cache. Each call says where the query is; without ``q_offset`` it
    is at position 0, also where the plan is used with a :class:`flexmask.KVCache`::

        plan = flexmask.plan("causal & key_padding(lengths)", q_len=1, kv_len=1024)
        lowered = plan(lengths=lengths, q_offset=position)

    Args:
        mask: a mask, its text, or a ``mask_mod``. Data that changes is a parameter of the mask: in text each name that is not one
            of flexmask, in Python ``flexmask.param("cu")``. So is a number that changes, as in ``sliding_window(size=w)``; other
            numbers are a part of the graph. A ``mask_mod`` has no parameters. It is traced at each call of the plan, as it may
            capture other tensors by then; for one that does not, :func:`flexmask.from_mask_mod` saves that time. In code that
            ``torch.compile`` traces it is the mask of the last call outside, or of this one.
        q_len: number of queries; None where each call gives the lengths.
        kv_len: number of keys; ``q_len`` by default.
        batch: sequences; by default those of the mask's data.
        heads: heads; by default those of the mask.
        device: where the mask is lowered; by default where its tensors are, else where the data of each call is, else the CPU.
        block_size: tokens in a block of the BlockMask, or the pair (queries, keys).
        compile: whether Inductor compiles the lowering, in 5 to 20 seconds at the first call. Without lengths also at the first
            ones with a single sequence, block, document or query. Not needed in code that ``torch.compile`` traces, where the
            lowering becomes a part of the whole graph.

    Raises:
        ExpressionError: a parameter named ``q_offset``.
        OperandError: an argument of a wrong type.
        LoweringError: a length or a size that is not possible.
    """
    refuse_traced("a plan")
    mask_mod = None if isinstance(mask, Mask | str) else mask
    mask = as_mask(mask, device=device)
    if "q_offset" in mask.params:
        raise ExpressionError(f"{mask.brief()} has the parameter q_offset, which a plan takes itself; rename it")
    check_flag(compile, "compile")
    if q_len is None and kv_len is not None:
        raise OperandError(f"kv_len={kv_len} without q_len: give both, or give both to each call of the plan")
    lengths = (0, 0) if q_len is None else _lengths(q_len, q_len if kv_len is None else kv_len)
    rest = [0 if size is None else checked_size(size, name) for name, size in (("batch", batch), ("heads", heads))]
    default = mask.tensors[0].device if mask.tensors else torch.device("cpu")
    where = default if device is None else _sync.resolve_device(device)
    follows = device is None and not mask.tensors
    setting = Setting(*lengths, rest[0], rest[1], 0, where, block_sizes(block_size))
    return Plan(mask, setting, compile=compile, follows=follows, mask_mod=mask_mod)


def _lengths(q_len: int, kv_len: int) -> tuple[int, int]:
    """The checked lengths, in compiled code as they are."""
    if torch.compiler.is_compiling():
        return q_len, kv_len
    return checked_size(q_len, "q_len"), checked_size(kv_len, "kv_len")


def _tensor(value: Any, name: str, device: torch.device) -> Tensor:
    """Data of a parameter as a tensor on a device."""
    if isinstance(value, int) and torch.compiler.is_compiling():
        return torch.full((), value, dtype=torch.int64, device=device)
    if not isinstance(value, Tensor):
        return as_table(value, name).to_tensor().to(device)
    check_plain(value, name)
    if value.device != device:
        raise LoweringError(f"{name} is on {value.device}, the plan on {device}; {_sync.move_remedy(value.device, device)}")
    return value
