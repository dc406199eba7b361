"""The site builds without a warning, fetches nothing, and has what is generated from code."""

from __future__ import annotations

import functools
import html
import inspect
import os
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.browser import chromium

import lightning_module_monitor
from lightning_module_monitor import STATISTICS, ModuleMonitorCallback
from lightning_module_monitor.cli import COMMANDS

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]  # one worker makes what they share
PAGES_TO_LOOK_AT = (
    "index",
    "concepts",
    "equivalence",
    "health",
    "how_to/store",
    "reference/detectors",
    "reference/options",
    "tutorials/is_my_model_learning",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it: a link to what is not there, or a page in no menu, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def text_of(page: Path) -> str:
    """The text of a page, without tags and with single spaces."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page.read_text())).split())


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Scripts, styles and pictures are in the folder; only links lead out of it."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        fetched = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?(https?:[^"\s>]+)', page.read_text())
        assert fetched == [], page


def test_the_reference_is_complete(site: Path) -> None:
    """Every public name, option, statistic with its formula, and command with its help."""
    pages = {page.stem: text_of(page) for page in (site / "reference").glob("*.html")}
    api = "".join(page.read_text() for page in [site / "reference" / "options.html", *(site / "reference" / "python").glob("*.html")])
    assert [name for name in lightning_module_monitor.__all__ if f".{name}" not in api] == []
    options = [name for name in inspect.signature(ModuleMonitorCallback).parameters if name not in pages["options"]]
    assert options == []
    for name, statistic in STATISTICS.items():
        finish = getattr(statistic, "finish", type(statistic))
        documented = getattr(finish, "func", finish).__doc__
        formula = " ".join((documented or "").replace("``", "").split())
        assert formula
        assert f"{name} {formula}" in pages["statistics"]
    for command in COMMANDS:
        assert f"usage: lightning-module-monitor {command.name}" in pages["cli"]
        assert " ".join(command.epilog.split()) in pages["cli"]


def test_pages_are_shown_without_errors(site: Path) -> None:
    """In light and dark colours and on a phone: no message of the browser, no request to another server, no line cut."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = f"http://127.0.0.1:{server.server_port}/"
        problems: list[str] = []
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 390)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
            page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("request", lambda request: problems.append(request.url) if not request.url.startswith((own, "data:")) else None)
            for name in PAGES_TO_LOOK_AT:
                page.goto(f"{own}{name}.html", wait_until="networkidle")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, name
                assert page.evaluate("[...document.querySelectorAll('pre code')].every(code => code.scrollWidth <= code.clientWidth)"), name
        server.shutdown()
    assert problems == []
