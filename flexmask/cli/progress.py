"""Progress on stderr for commands that take longer than a moment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

from flexmask.cli.output import to_stderr

if TYPE_CHECKING:
    from rich.status import Status

#: Seconds before anything is shown.
DELAY = 0.7


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Shows a text with a spinner after a short delay; yields a function that changes the text.

    Nothing is shown if stderr is not a terminal. Output of user functions goes to stderr meanwhile, see
    :func:`flexmask.cli.output.to_stderr`; print the answer afterwards.
    """
    sign = _Sign(doing)
    timer = Timer(DELAY, sign.show)
    if sys.stderr.isatty():
        timer.daemon = True
        timer.start()
    with to_stderr():
        try:
            yield sign.update
        finally:
            timer.cancel()
            sign.remove()  # rich restores the stream that it found


@contextmanager
def block_progress(doing: str) -> Iterator[None]:
    """As :func:`spinner`, with the share of the open blocks that are evaluated."""
    with spinner(doing) as update:
        from flexmask.blocks.survey import watched

        with watched(lambda share: update(f"{doing}: {share:.0%} of the blocks that have to be evaluated")):
            yield


class _Sign:
    """A text that is shown after a delay."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = Lock()
        self._removed = False
        self._status: Status | None = None

    def show(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._removed:
                self._status = Console(stderr=True).status(self._text)
                self._status.start()

    def update(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._status is not None:
                self._status.update(text)

    def remove(self) -> None:
        with self._lock:
            self._removed = True
            if self._status is not None:
                self._status.stop()
