"""Caches whose keys belong to several packed documents. Tokens that follow would attend to all of them, so they are an error."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flexmask._sync import assert_async
from flexmask.errors import LoweringError
from flexmask_transformers.packing import is_packed

__all__ = ["Keys", "note_keys", "require_one_document"]

#: The attribute of a cache that has its `Keys`.
ATTRIBUTE = "_flexmask_keys"
MESSAGE = (
    "the cache holds the keys of several packed documents, so that further tokens would attend to all of them; give each "
    "document a row, or do not pass the cache on"
)


class Keys:
    """What is known of the keys in a cache.

    Attributes:
        several: whether those of a row belong to several documents; a tensor without axes where reading it would force a host
            sync.
    """

    several: bool | Tensor = False

    def note(self, documents: Tensor) -> None:
        """Notes the documents ``int[B, S]`` of keys that are added to an empty cache."""
        self.several = is_packed(documents)


def note_keys(cache: Any) -> Keys:
    """New `Keys` of a cache that is empty."""
    keys = Keys()
    setattr(cache, ATTRIBUTE, keys)
    return keys


def require_one_document(cache: Any, q_offset: int | Tensor) -> None:
    """An error where tokens follow the keys of several documents.

    Args:
        cache: a cache, or None.
        q_offset: the number of tokens that it holds.

    Raises:
        LoweringError: they do. In a graph it is an error where it runs.
    """
    keys = getattr(cache, ATTRIBUTE, None)
    if keys is None or keys.several is False:
        return
    if not torch.compiler.is_compiling():
        keys.several = bool(keys.several) and int(q_offset) > 0  # a cache is empty again after a reset
        if keys.several:
            raise LoweringError(MESSAGE)
    elif isinstance(keys.several, Tensor) or isinstance(q_offset, Tensor):
        # As a tensor, a number that varies would be the one of this call; as a factor it is not.
        assert_async(cast(Tensor, keys.several * q_offset == 0), MESSAGE)
    elif q_offset > 0:
        raise LoweringError(MESSAGE)
