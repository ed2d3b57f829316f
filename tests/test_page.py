"""The web page in a real browser: draw, predict, teach, undo (Chromium through Playwright)."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawings import NAMES, SOURCE, drawings
from serving import served
from small import TINY, tiny_vit

from coda_prompt import ContinualClassifier
from coda_prompt.model.catalog import write_weights
from coda_prompt.preprocessing import Preprocessing

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
SHOTS = os.environ.get("CODA_SCREENSHOTS")
"""A folder for screenshots of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page of the demo model; a JavaScript error fails the test."""
    with served() as client:
        context = browser.new_context(viewport={"width": 1100, "height": 900})
        found = context.new_page()
        errors: list[str] = []
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.set_default_timeout(60_000)
        found.goto(str(client.base_url))
        found.wait_for_function("document.querySelectorAll('#classes li').length > 10")
        yield found
        context.close()
        assert errors == []


def draw(page: Any, lines: list[list[tuple[float, float]]]) -> None:
    """Draw with the mouse; coordinates are fractions of the canvas."""
    box = page.locator("#canvas").bounding_box()
    for line in lines:
        points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in line]
        page.mouse.move(*points[0])
        page.mouse.down()
        for point in points[1:]:
            page.mouse.move(*point)
        page.mouse.up()


def zigzag(rng: random.Random) -> list[list[tuple[float, float]]]:
    teeth, height = 6, rng.uniform(0.1, 0.2)
    return [[(0.1 + 0.8 * n / teeth, 0.5 + height * (-1) ** n + rng.uniform(-0.02, 0.02))
             for n in range(teeth + 1)]]  # fmt: skip


def grid(rng: random.Random) -> list[list[tuple[float, float]]]:
    def position(n: int) -> float:
        return 0.15 + 0.7 * n / 3 + rng.uniform(-0.02, 0.02)

    down = [[(position(n), 0.12), (position(n), 0.88)] for n in range(4)]
    return down + [[(0.12, position(n)), (0.88, position(n))] for n in range(4)]


def ring(rng: random.Random) -> list[list[tuple[float, float]]]:
    radius = rng.uniform(0.25, 0.35)
    return [[(0.5 + radius * math.cos(t / 4), 0.5 + radius * math.sin(t / 4))
             for t in range(27)]]  # fmt: skip


def predictions(page: Any) -> list[str]:
    return page.locator("#predictions .name").all_inner_texts()


def wait_for_prediction(page: Any, name: str) -> None:
    page.wait_for_function(
        "name => document.querySelector('#predictions .name')?.textContent === name", arg=name
    )


def test_predictions_update_while_drawing(page: Any) -> None:
    draw(page, ring(random.Random(0)))
    page.wait_for_selector("#predictions li")
    first = page.locator("#predictions").inner_text()
    assert len(predictions(page)) == 5
    draw(page, [[(0.1, 0.1), (0.9, 0.9)], [(0.1, 0.9), (0.9, 0.1)]])
    page.wait_for_function(
        "before => document.querySelector('#predictions').innerText !== before", arg=first
    )
    page.click("#undo-stroke")
    page.click("#clear")
    page.wait_for_function("document.querySelectorAll('#predictions li').length === 0")


def demo_image(page: Any, tmp_path: Path) -> tuple[Path, str]:
    """Save a test drawing that the demo model predicts correctly; return its path and class."""
    known = set(page.locator("#classes li").all_inner_texts())
    for place, label in enumerate(SOURCE.test.labels):
        name = SOURCE.class_names[label]
        if name in known:
            path = tmp_path / "drawing.png"
            SOURCE.test.image(place).save(path)
            page.set_input_files("#predict-file", path)
            page.wait_for_selector("#predictions li")
            page.wait_for_timeout(300)
            if predictions(page)[0] == name:
                return path, name
    raise AssertionError("the demo model predicts no test drawing correctly")


def test_teach_two_classes_and_undo(page: Any, tmp_path: Path) -> None:
    path, old = demo_image(page, tmp_path)
    rng = random.Random(1)
    shapes = {"my zigzag": zigzag, "my grid": grid}
    assert page.locator("#teach").is_disabled()
    for name, shape in shapes.items():
        page.fill("#name", name)
        for _ in range(6):
            draw(page, shape(rng))
            page.click("#add")
    page.wait_for_function("document.querySelectorAll('.strip img').length === 12")
    assert page.locator("#teach").is_enabled()
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/teaching.png", full_page=True)
    page.click("#teach")
    page.wait_for_selector("#progress:not([hidden])")
    page.wait_for_function("document.querySelector('#report').textContent.startsWith('Learned')")
    assert "Old classes" in page.locator("#report").inner_text()
    page.wait_for_function("document.querySelectorAll('#classes li.new-class').length === 2")
    for name, shape in shapes.items():
        page.click("#clear")
        draw(page, shape(random.Random(99)))
        wait_for_prediction(page, name)
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/taught.png", full_page=True)
    page.set_input_files("#predict-file", path)
    wait_for_prediction(page, old)
    page.click("#undo")
    page.wait_for_function("document.querySelectorAll('#classes li.new-class').length === 0")
    assert not set(shapes) & set(page.locator("#classes li").all_inner_texts())
    draw(page, zigzag(random.Random(99)))
    page.wait_for_timeout(500)
    assert "my zigzag" not in predictions(page)


def test_page_of_a_model_for_photographs_asks_for_files(browser: Any, tmp_path: Path) -> None:
    vit = tiny_vit(config=replace(TINY, channels=3))
    write_weights(tmp_path / "colour.safetensors", vit, Preprocessing(16))
    classifier = ContinualClassifier(str(tmp_path / "colour.safetensors"), method="ncm")
    classifier.learn(*drawings(range(2), 5))
    classifier.save(tmp_path / "model")
    with served(str(tmp_path / "model")) as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        page.wait_for_function("document.body.dataset.input === 'photograph'")
        assert page.locator("h1").inner_text() == "Show and teach photographs"
        for hidden in ("#undo-stroke", "#clear", "#add"):
            assert not page.locator(hidden).is_visible()
        draw(page, ring(random.Random(0)))  # does nothing
        SOURCE.test.image(0).save(tmp_path / "image.png")
        page.set_input_files("#predict-file", tmp_path / "image.png")
        page.wait_for_selector("#predictions li")
        page.close()


def test_errors_are_shown(page: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.png"
    wrong.write_text("no image")
    page.set_input_files("#predict-file", wrong)
    page.wait_for_selector("#error:not([hidden])")
    assert "it is not an image that can be read" in page.locator("#error").inner_text()
    draw(page, ring(random.Random(0)))
    page.wait_for_selector("#error", state="hidden")
    page.click("#add")
    assert "class name first" in page.locator("#error").inner_text()


def test_keyboard_navigation(page: Any) -> None:
    page.focus("#name")
    page.keyboard.type("thing")
    page.keyboard.press("Enter")
    assert "Draw an example first" in page.locator("#error").inner_text()
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"canvas", "undo-stroke", "clear", "predict-file", "name", "add", "add-files"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input')].filter(e => !(e.textContent.trim() || "
        "e.getAttribute('aria-label') || e.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 1100), ("light", 390)])
def test_light_dark_and_phone_layout(scheme: str, width: int, browser: Any) -> None:
    with served() as client:
        context = browser.new_context(
            color_scheme=scheme, viewport={"width": width, "height": 844}, has_touch=width < 500
        )
        page = context.new_page()
        page.goto(str(client.base_url))
        page.wait_for_function("document.querySelectorAll('#classes li').length > 10")
        draw(page, ring(random.Random(0)))
        page.wait_for_selector("#predictions li")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in ground[4:-1].split(",")) > 380
        assert bright == (scheme == "light")
        wider = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wider, "nothing is cut off"
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/{scheme}-{width}.png", full_page=True)
        context.close()


def test_token_can_be_entered_on_the_page(browser: Any) -> None:
    with served(CODA_TOKEN="correct horse") as client:
        page = browser.new_context().new_page()
        page.goto(str(client.base_url))
        page.wait_for_selector("#token-form:not([hidden])")
        page.fill("#token", "correct horse")
        page.click("#token-form button")
        page.wait_for_function("document.querySelectorAll('#classes li').length > 10")
        assert NAMES[0] in page.locator("#classes").inner_text()
