"""Record the page of `coda serve` in Chromium: docs/images/page.png and docs/images/page.gif.

    python tools/record_page.py

Draws a known thing, then teaches a new class with five drawings, as a person would. Needs the
extra `dev` (Playwright) and Chromium.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import ViewportSize, sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = ViewportSize(width=1060, height=760)
PATIENCE = 300_000
Stroke = list[tuple[float, float]]


def envelope() -> list[Stroke]:
    """Strokes of an envelope in a unit square: the border and the flap."""
    corners = [(0.12, 0.25), (0.88, 0.25), (0.88, 0.75), (0.12, 0.75), (0.12, 0.25)]
    return [_through(corners), _through([(0.12, 0.25), (0.5, 0.55), (0.88, 0.25)])]


def _through(corners: Stroke, points: int = 14) -> Stroke:
    """Return points on the lines between corners."""
    return [
        (x + (to_x - x) * step / points, y + (to_y - y) * step / points)
        for (x, y), (to_x, to_y) in pairwise(corners)
        for step in range(points + 1)
    ]


def spiral(turns: float) -> list[Stroke]:
    """One stroke of a spiral."""
    angles = [0.25 * i for i in range(int(turns * 25))]
    reach = angles[-1]
    return [
        [(0.5 + 0.4 * a / reach * math.cos(a), 0.5 + 0.4 * a / reach * math.sin(a)) for a in angles]
    ]


class Recording:
    """Frames of a page while something is done on it."""

    def __init__(self, page: Any) -> None:
        self.page, self.frames = page, list[Image.Image]()
        self.times = list[int]()

    def frame(self, milliseconds: int = 120) -> None:
        """Take a frame that is shown so long."""
        self.frames.append(Image.open(io.BytesIO(self.page.screenshot())).convert("RGB"))
        self.times.append(milliseconds)

    def draw(self, strokes: list[Stroke], every: int = 8) -> None:
        """Draw strokes with the mouse; a frame every so many points."""
        box = self.page.locator("#canvas").bounding_box()
        for stroke in strokes:
            for number, (x, y) in enumerate(stroke):
                point = box["x"] + x * box["width"], box["y"] + y * box["height"]
                self.page.mouse.move(*point)
                if number == 0:
                    self.page.mouse.down()
                if every and number % every == 0:
                    self.frame()
            self.page.mouse.up()
        self.page.wait_for_selector("#predictions li")

    def save(self, path: Path) -> None:
        """Write an animation in half size with 64 colours."""
        half = [each.resize((each.width * 2 // 3, each.height * 2 // 3)) for each in self.frames]
        first, *others = [each.quantize(64, dither=Image.Dither.NONE) for each in half]
        first.save(path, save_all=True, append_images=others, duration=self.times, loop=0)


def main() -> None:
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for url in _service():
            page = browser.new_page(viewport=SIZE)
            page.set_default_timeout(PATIENCE)
            page.goto(url)
            page.wait_for_selector("body[data-ready]")
            _record(Recording(page))
        browser.close()


def _service() -> Iterator[str]:
    """Yield the address of a running service."""
    command = [sys.executable, "-m", "coda_prompt", "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        yield json.loads(service.stdout.readline())["url"]
        service.terminate()


def _record(recording: Recording) -> None:
    page = recording.page
    recording.frame(600)
    recording.draw(envelope())
    page.wait_for_timeout(1500)
    recording.frame(1800)
    page.screenshot(path=FOLDER / "page.png")
    page.click("#clear")
    page.fill("#name", "spiral")
    for number in range(5):
        recording.draw(spiral(3 + number / 2), every=12 if number == 0 else 0)
        page.click("#add")
        page.wait_for_timeout(300)
        recording.frame(500)
    page.click("#teach")
    recording.frame(900)
    page.wait_for_function("document.querySelector('#report').textContent.includes('now.')")
    recording.frame(1500)
    page.click("#clear")
    recording.draw(spiral(3.3), every=12)
    page.wait_for_timeout(1500)
    recording.frame(2500)
    recording.save(FOLDER / "page.gif")


if __name__ == "__main__":
    main()
