"""How many kernels the lowering of a packed mask launches where no value is read: one for each operation that is no view."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexmask as fm

LENGTH = 8192
#: The most launches of ``block_mask`` of causal, packed and padded tokens.
MOST = 60
#: Operators that give views, or numbers in the memory of the host.
FREE = {
    *("alias", "as_strided", "detach", "expand", "permute", "reshape", "select", "slice", "split", "squeeze", "t", "transpose"),
    *("unbind", "unfold", "unsqueeze", "view", "_unsafe_view", "scalar_tensor"),
}


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_launches_of_a_packed_mask() -> None:
    cu, lengths = (torch.zeros(*shape, dtype=torch.long, device="meta") for shape in ((1, 9), (1,)))
    mask = fm.causal() & fm.document(cu_seqlens=cu, padding=True) & fm.key_padding(lengths)
    with Launches() as launches:
        mask.block_mask(LENGTH, device="meta")
    assert 20 < len(launches.names) <= MOST, launches.names
