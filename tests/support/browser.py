"""Pages in a real browser: Chromium, a page that notes what goes wrong, and what its canvas shows."""

from __future__ import annotations

import io
import os
import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["Opened", "chromium", "opened", "screenshot", "watched_page"]

SCREEN: Any = {"width": 1280, "height": 800}
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def unavailable(reason: str) -> NoReturn:
    """Without a browser a test is skipped, except in continuous integration, which must have one."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser of the system; none is downloaded."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        unavailable("no Chromium on this machine")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(headless=True, executable_path=path, args=QUIET)
        browser.new_context().new_page()  # see watched_page
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page with a view, and what happened to it.

    Attributes:
        page: the page.
        troubles: warnings and errors on its console, and what it raised.
        requests: what it asked for, itself included.
    """

    page: Page
    troubles: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Waits until everything asked for is drawn."""
        self.page.wait_for_selector(".flexmask[aria-busy=false]")
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    @property
    def readout(self) -> str:
        return self.page.locator(".flexmask-readout").text_content() or ""

    def hover(self, x: float, y: float) -> str:
        """Moves the mouse to a place on the canvas and returns what is said about it."""
        box = self.page.locator(".flexmask-stage canvas").bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        return self.readout

    def picture(self) -> tuple[int, int, bytes]:
        """The canvas: its width and height in device pixels, and their red, green, blue and alpha, row by row."""
        self.settle()
        _, _, encoded = self.page.evaluate(READ).partition(",")
        with Image.open(io.BytesIO(b64decode(encoded))) as picture:
            return picture.width, picture.height, picture.convert("RGBA").tobytes()


# A copy is read: the canvas itself stays as it is where users see it.
READ = """() => {
  const canvas = document.querySelector(".flexmask-stage canvas"), copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  copy.getContext("2d").drawImage(canvas, 0, 0);
  return copy.toDataURL("image/png");
}"""


@contextmanager
def opened(browser: Browser, html: str, folder: Path, **options: Any) -> Iterator[Opened]:
    """A page opened from a file, with the given options of its context (``viewport``, ``color_scheme``, ...)."""
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    with watched_page(browser, **options) as found:
        found.page.goto(path.as_uri())
        found.settle()
        yield found


@contextmanager
def watched_page(browser: Browser, viewport: Any = SCREEN, **options: Any) -> Iterator[Opened]:
    """An empty page that notes what happens to it.

    With options it has a context of its own. Without, all tests have the same page in turn: a new one starts two processes.
    """
    page = browser.new_context(**options).new_page() if options else browser.contexts[0].pages[0]
    page.set_viewport_size(viewport)
    found = Opened(page)
    listeners: dict[Any, Callable[[Any], None]] = {
        "request": lambda request: found.requests.append(request.url),
        "console": lambda said: found.troubles.append(said.text) if said.type in {"warning", "error"} else None,
        "pageerror": lambda error: found.troubles.append(str(error)),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        yield found
    finally:
        if options:
            page.context.close()
        else:
            page.goto("about:blank")
            page.mouse.move(0, 0)
            for event, listener in listeners.items():
                page.remove_listener(event, listener)


def screenshot(page: Page, name: str, folder: Path) -> None:
    """Keeps a picture of the page, in ``$FLEXMASK_SCREENSHOTS`` if that is set."""
    target = Path(os.environ.get("FLEXMASK_SCREENSHOTS") or folder)
    target.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=target / f"{name}.png", full_page=True)
