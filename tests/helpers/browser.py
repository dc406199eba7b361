"""A real browser, where there is one: Debian's Chromium, driven by playwright, which fetches nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; the test is skipped where there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser here ({', '.join(NAMES)}); on Debian: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; it is in the extra test")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that is open, and what it did that it should not.

    Args:
        browser: Where to open it.
        path: The file.
        dark: Whether the system is set to dark colours.
        width: Of the window, in pixels.
    """

    def __init__(self, browser: Browser, path: Path, *, dark: bool = False, width: int = 1200) -> None:
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
        )
        self.complaints: list[str] = []
        """Errors and warnings of the console, and errors that nobody caught."""
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def show(self, section: str) -> None:
        """Scroll to a section, and wait for its first chart."""
        self.page.evaluate("id => document.getElementById(id).scrollIntoView({behavior: 'instant'})", section)
        self.page.locator(f"#{section} .main-svg").first.wait_for()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.wait_for_function("() => waiting.size === 0")
        self.page.wait_for_timeout(300)
