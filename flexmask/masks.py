"""Every named mask as an attribute, those of plugins too: ``flexmask.masks.causal``, ``from flexmask.masks import NAME``.

A name that flexmask itself does not define loads the plugins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexmask import registry
from flexmask._checks import nearest

if TYPE_CHECKING:
    from flexmask.catalogue import *  # noqa: F403 - their signatures, for type checkers and editors


def __getattr__(name: str) -> Any:
    if name == "__all__":  # for `from flexmask.masks import *`
        return registry.names()
    define = None if name.startswith("_") else registry.find(name)
    if define is None:
        hint = "" if name.startswith("_") else nearest(name, registry.names())
        raise AttributeError(f"there is no named mask {name}.{hint} `flexmask list` shows all; plugins add more")
    return define


def __dir__() -> list[str]:
    return registry.names()
