"""A picture of a report, as the README has it: the page in Chromium, from its top to the heat map.

It needs Chromium and the extra ``test``. The README's is of the demo with a learning rate that is a thousand times too large::

    python examples/digits.py fit --config configs/digits.yaml --model.learning_rate 3
    python docs/report_picture.py demo_output/digits/version_0/monitor.html docs/report.png
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

WIDTH, HEIGHT = 1200, 1345


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Take a picture of a report.")
    parser.add_argument("report", type=Path, help="path of monitor.html")
    parser.add_argument("picture", type=Path, help="path of the PNG file")
    options = parser.parse_args()
    with sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, reduced_motion="reduce")
        page.goto(options.report.resolve().as_uri())
        page.locator("#heat .main-svg").first.wait_for()
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)
        page.screenshot(path=options.picture)
        browser.close()


if __name__ == "__main__":
    main()
