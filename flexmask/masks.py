"""Every named mask as an attribute, those of plugins too: ``flexmask.masks.causal``, ``from flexmask.masks import NAME``.

A name that flexmask itself does not define loads the plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flexmask import registry
from flexmask._checks import nearest

if TYPE_CHECKING:
    from flexmask.catalogue import *  # noqa: F403 - their signatures, for type checkers and editors
    from flexmask.expr.mask import Mask


def __getattr__(name: str) -> Callable[..., Mask]:
    define = None if name.startswith("_") else registry.find(name)
    if define is None:
        hint = "" if name.startswith("_") else nearest(name, registry.names())
        raise AttributeError(f"there is no named mask {name}.{hint} `flexmask list` shows all; plugins add more")
    return define


def __dir__() -> list[str]:
    return registry.names()
