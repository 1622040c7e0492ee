"""The versions of transformers that the plugin supports."""

from importlib.metadata import requires

__all__ = ["requirement"]


def requirement() -> str:
    """What the installed plugin requires, such as ``transformers<6,>=5.4``."""
    return next(text for text in requires("flexmask-transformers") or () if text.startswith("transformers"))
