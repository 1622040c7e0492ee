"""FlexAttention's CUDA kernels, forward and backward, on a machine without a GPU.

`torch.compile(flex_attention)` writes kernels in Triton's language for the device of its inputs, and only those for CUDA have
gradients. A CUDA build of torch can write them anywhere. So this module has them written for a GPU that is not there, and runs
them on the CPU in the interpreter that comes with Triton. A test then sees what a GPU would compute, but for rounding:

1. Dynamo and AOTAutograd trace tensors on the CPU, as they come. What a graph computes does not depend on the device.
2. Each graph that reaches Inductor is compiled with fake tensors on ``cuda:0`` in place of those on the CPU (`_compiler`). So
   Inductor chooses its templates, block sizes and launch grids for the GPU that is described here. What it asks the driver is
   answered from that description (`driver`).
3. What Inductor returns is Python code that allocates tensors, launches kernels, and uses nothing of a tensor but its strides
   and its address. It runs on the tensors on the CPU. Only the allocator is replaced (`_allocated`), by one that fills memory
   with NaN, so that no result can rest on memory that nothing wrote.
4. With ``TRITON_INTERPRET=1`` Inductor's launcher hands a kernel to Triton's interpreter, which runs its Python source with
   NumPy, one program of the grid after the other. Each address that it reads or writes must lie in one of the kernel's
   arguments (`Memory`), which no GPU checks.

Without ``TRITON_INTERPRET`` the same path compiles the kernels instead, with Triton and ptxas, to machine code (`resources`).
That needs no GPU either, and shows what an interpreter cannot: that they build, and fit into the shared memory of their GPU.

Neither shows what depends on the hardware: races between programs, and how matrix units round.

The patches hold for a process, which should run nothing else (`install`). They are made for torch 2.11 to 2.15, whose private
parts they touch: where another version moves these, `install` fails at a name that is missing, not in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as flex
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils import _triton as triton_state
from torch.utils._pytree import tree_map
from triton.runtime import interpreter

import flexmask._sync
import flexmask.backends.flex

__all__ = [
    "A100",
    "B200",
    "H100",
    "H100_SLICE",
    "INTERPRETED",
    "RTX",
    "OutOfBoundsError",
    "Resources",
    "driver",
    "install",
    "launched",
    "resources",
]

CUDA = torch.device("cuda", 0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton and Inductor decide


def _gpu(name: str, capability: tuple[int, int], processors: int, shared: int) -> SimpleNamespace:
    """What the driver says of a GPU, in bytes."""
    return SimpleNamespace(
        name=name,
        gcnArchName="",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=processors,
        warp_size=32,
        total_memory=80 * 2**30,
        L2_cache_size=40 * 2**20,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=shared - 2**10,
        shared_memory_per_multiprocessor=shared,
    )


A100 = _gpu("NVIDIA A100", (8, 0), 108, 164 * 2**10)
H100 = _gpu("NVIDIA H100", (9, 0), 132, 228 * 2**10)
B200 = _gpu("NVIDIA B200", (10, 0), 148, 228 * 2**10)
RTX = _gpu("NVIDIA RTX PRO 6000", (12, 0), 188, 100 * 2**10)
#: An eighth of one, as its users may rent it. Decoding runs programs for each processor, and the interpreter one after another.
H100_SLICE = _gpu("NVIDIA H100 MIG 1g.10gb", (9, 0), 16, 228 * 2**10)


# ---------------------------------------------------------------- compilation


@contextmanager
def driver(gpu: SimpleNamespace) -> Iterator[None]:
    """A context in which a GPU's description stands in for the driver."""
    properties: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: gpu,
    }
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            **properties,
            "is_available": lambda: True,
            "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
            "get_device_name": lambda device=None: gpu.name,
            "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda *args: None,
            "_lazy_init": lambda: None,
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
        },
        CudaInterface: {name: staticmethod(answer) for name, answer in properties.items()},
        torch._subclasses.fake_tensor: {"init_gpu_context": lambda *args: None},
    }
    with ExitStack() as stack:
        for owner, functions in answers.items():
            stack.enter_context(mock.patch.multiple(owner, **functions))
        triton_state.has_triton.cache_clear()
        stack.callback(triton_state.has_triton.cache_clear)
        yield


def _as_inputs(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Makes the tensors that a graph holds its last inputs, and returns them: made on a GPU they would lie there."""
    constants: list[Tensor] = []
    for node in list(graph.graph.nodes):
        held = getattr(graph, node.target) if node.op == "get_attr" else None
        if isinstance(held, Tensor):
            *_, last = graph.graph.find_nodes(op="placeholder") or [graph.graph._root]
            with graph.graph.inserting_after(last):
                given = graph.graph.placeholder(f"constant_{len(constants)}")
            given.meta = {**node.meta, "val": torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=CUDA)}
            node.replace_all_uses_with(given)
            graph.graph.erase_node(node)
            constants.append(held)
    graph.recompile()
    return constants


def _compiler(gpu: SimpleNamespace) -> Callable[..., Any]:
    """A compiler of graphs for torch.compile."""

    def on_cuda(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
        return CUDA if isinstance(value, torch.device) else value

    def compile_for_cuda(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with driver(gpu):
            with torch._guards.detect_fake_mode(inputs) or nullcontext():
                for module in graph.modules():
                    for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                        node.args, node.kwargs = tree_map(on_cuda, node.args), tree_map(on_cuda, node.kwargs)
                        if "val" in node.meta:
                            node.meta["val"] = tree_map(on_cuda, node.meta["val"])
                constants = _as_inputs(graph)
                inputs = [on_cuda(value) for value in (*inputs, *constants)]
            found = compile_fx_inner(graph, inputs, **options)

        def run(values: list[Any]) -> Any:
            values.extend(constants)  # which the code that Inductor writes takes from its list
            return found(values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=compile_for_cuda)


# ---------------------------------------------------------------- execution


class OutOfBoundsError(IndexError):
    """A kernel touched memory that is not of its arguments."""


class Memory:
    """What the kernel that runs may touch: the memory of the tensors that it was given."""

    starts: ClassVar[np.ndarray[Any, Any]] = np.zeros(0, np.uint64)
    stops: ClassVar[np.ndarray[Any, Any]] = np.zeros(0, np.uint64)

    @classmethod
    def of(cls, args: Sequence[Any]) -> None:
        storages = [arg.untyped_storage() for arg in args if isinstance(arg, Tensor)]
        spans = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages if storage.nbytes()})
        cls.starts, cls.stops = np.array(spans, np.uint64).reshape(-1, 2).T

    @classmethod
    def check(cls, addresses: np.ndarray[Any, Any]) -> None:
        span = np.searchsorted(cls.starts, addresses, side="right") - 1
        if addresses.size and ((span < 0) | (addresses >= cls.stops[span])).any():
            raise OutOfBoundsError("a kernel leaves the memory of its arguments")

    @classmethod
    def guarded(cls, operation: Callable[..., Any], pointers: int, mask: int) -> Callable[..., Any]:
        """An operation of the interpreter that checks its addresses, given where these and their mask stand in its arguments."""

        def checked(self: Any, *args: Any) -> Any:
            at = args[pointers].data
            cls.check(at[np.broadcast_to(args[mask].data, at.shape)].astype(np.uint64))
            return operation(self, *args)

        return checked


#: The kernels that were launched, in order.
launched: list[str] = []


def _allocated(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory as an allocator gives it, on the CPU, and with contents that nobody can take for a result."""
    return torch.empty_strided(size, stride, dtype=dtype).fill_(float("nan") if dtype.is_floating_point else 77)


def _interpreted(self: Any, *args: Any, run: Callable[..., Any] = CachingAutotuner.run, **options: Any) -> Any:
    """Launches a kernel in the widest of the configurations that Inductor would try, which needs the fewest programs."""

    def width(config: Any) -> Any:
        return np.prod([size for name, size in config.kwargs.items() if name.endswith("BLOCK")])

    self.configs = [max(self.configs, key=width)]
    launched.append(self.fn.__name__)
    Memory.of(args)
    return run(self, *args, **options)


def _patch_interpreter(patch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter lacks, and the check of addresses."""
    builder, language = interpreter.InterpreterBuilder, triton.language
    # It patches triton.language in each call of a function, which takes most of its time: once is enough.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
    # It computes whether sums of integers overflow, for assertions that it makes in debug mode alone.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    # NumPy 2.4 has no int() of an array that holds one number.
    patch.setattr(language.tensor, "__index__", lambda self: self.handle.data.item())
    # It calls no functions of libraries. Those that Inductor takes from one are in the language too.
    patch.setattr(triton_helpers, "libdevice", language.math)

    # It holds bfloat16 as bits, and multiplies matrices of them as if these were integers.
    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    dot = builder.create_dot
    patch.setattr(builder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
    # Its atomic operations read broadcast operands as if each element had memory.
    atomic = builder.create_atomic_rmw

    def stored(handle: Any) -> Any:
        return interpreter.TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)

    patch.setattr(
        builder,
        "create_atomic_rmw",
        lambda self, op, *operands: atomic(self, op, *map(stored, operands[:3]), *operands[3:]),
    )
    # The places of the addresses and of their mask among the arguments.
    for name, places in (("create_masked_load", (0, 1)), ("create_masked_store", (0, 2)), ("create_atomic_rmw", (1, 3))):
        patch.setattr(builder, name, Memory.guarded(getattr(builder, name), *places))


# ---------------------------------------------------------------- machine code


@dataclass(frozen=True)
class Resources:
    """What a kernel that was built takes: bytes of machine code, and of shared memory of those that a block may have."""

    name: str
    architecture: int
    code: int
    shared: int
    available: int


#: The kernels that were built, in order.
resources: list[Resources] = []


def _patch_build(patch: pytest.MonkeyPatch, gpu: SimpleNamespace) -> None:
    """Has kernels built, and not launched."""
    plain = triton.compile

    def build(*args: Any, **options: Any) -> Any:
        built = plain(*args, **options)
        code = built.asm["cubin"]
        assert code.startswith(b"\x7fELF")
        fields = built.metadata.name, built.metadata.target.arch, len(code), built.metadata.shared
        resources.append(Resources(*fields, gpu.shared_memory_per_block_optin))
        return built

    def compiled(kernel: Any, *args: Any, **options: Any) -> None:
        kernel._precompile_worker()

    def not_launched(kernel: Any, *args: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)

    patch.setattr(triton, "compile", build)
    patch.setattr(CachingAutotuner, "precompile", compiled)
    patch.setattr(CachingAutotuner, "run", not_launched)


# ---------------------------------------------------------------- all of it

#: Backward blocks of float32: Inductor's own are 16 wide, of which the interpreter would run many programs.
BACKWARD_BLOCKS = {f"bwd_BLOCK_{name}": 128 for name in ("M1", "N1", "M2", "N2")}


def install(patch: pytest.MonkeyPatch, gpu: SimpleNamespace = H100_SLICE) -> Callable[..., Any]:
    """Has `flexmask.attention` run, or build, the kernels for a GPU.

    Args:
        patch: undoes it.
        gpu: the GPU.

    Returns:
        A backend of `torch.compile` that does.
    """
    backend = _compiler(gpu)
    compiled = torch.compile(flex.flex_attention, backend=backend, fullgraph=True)
    target = triton.backends.compiler.GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size)
    host: dict[str, Any] = {
        "get_current_target": lambda: target,
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device=None: 0,
        "get_active_torch_device": lambda: torch.device("cpu"),
    }
    triton.runtime.driver.set_active(SimpleNamespace(**host))
    patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    patch.setattr(torch._inductor.config, "compile_threads", 1)
    patch.setattr(torch._inductor.config, "fx_graph_cache", False)
    patch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    # What the generated code takes from CUDA.
    patch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", _allocated)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
    patch.setattr(torch.cuda, "_DeviceGuard", lambda device: nullcontext())
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    if INTERPRETED:
        _patch_interpreter(patch)
        patch.setattr(CachingAutotuner, "run", _interpreted)
    else:
        _patch_build(patch, gpu)
    # Where torch and flexmask go by the device: on the CPU FlexAttention has no gradients, and values of tensors are read.
    plain = flex._apply_kernel_options

    def options_of(query: Tensor, *args: Any, **named: Any) -> Any:
        options: Any = plain(query, *args, **named)
        options["OUTPUT_LOGSUMEXP"] = options["OUTPUT_LOGSUMEXP"] or torch.is_grad_enabled()
        if INTERPRETED and query.dtype == torch.float32:
            options.update(BACKWARD_BLOCKS)
        return options

    patch.setattr(flex, "_apply_kernel_options", options_of)
    patch.setattr(flex, "_validate_device", lambda query, key, value: None)
    patch.setattr(flexmask.backends.flex, "_inference_only", lambda tensor: False)
    patch.setattr(flexmask.backends.flex, "_compiled", lambda device: compiled)
    patch.setattr(flexmask._sync, "needs_sync", lambda tensor: True)
    return backend
