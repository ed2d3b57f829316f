"""The web page in a real browser (Chromium through Playwright, with a fake camera).

`CODA_AXE=path/to/axe.min.js` (npm package axe-core) also checks the accessibility of every state,
and `CODA_SCREENSHOTS=folder` saves screenshots: both for desktop and phone, light and dark.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawings import NAMES, SOURCE, drawings, taught
from PIL import Image
from serving import children_of, png, served, teach, wait_for_job

from coda_prompt import ContinualClassifier
from coda_prompt.learner.folder import ModelFolder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
LAYOUTS = [("light", 1100), ("dark", 1100), ("light", 390), ("dark", 390)]
"""Colour scheme and width of desktop and phone."""
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
]
SHOTS = os.environ.get("CODA_SCREENSHOTS")
AXE = os.environ.get("CODA_AXE")
PHOTO = "photo-vit"
"""An encoder for photographs, of one network."""
TIMEOUT = 120_000
"""Milliseconds to wait for anything: a busy machine is not a failure."""


REFUSED = re.compile(".*Content Security Policy.*")


def wait_for(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until JavaScript is true; playwright's own function needs `unsafe-eval`."""
    deadline = time.monotonic() + TIMEOUT / 1000
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()


@contextlib.contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """The page at a URL; JavaScript errors, requests to other hosts and violations of the
    Content-Security-Policy fail the test."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options})
    page = context.new_page()
    problems: list[str] = []

    def check_host(request: Any) -> None:
        if not request.url.startswith((url.split("/models/")[0], "blob:", "data:")):
            problems.append(request.url)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.extend(REFUSED.findall(line.text)))
    page.on("request", check_host)
    page.set_default_timeout(TIMEOUT)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    yield page
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def demo_url() -> Iterator[str]:
    """A service whose models, for drawings and for photographs, no test changes."""
    with served("--backbone", PHOTO) as client:
        yield str(client.base_url)


@pytest.fixture
def page(browser: Any, demo_url: str) -> Iterator[Any]:
    """The page of the demo model."""
    with opened(browser, demo_url) as page:
        yield page


@pytest.fixture
def photo_model(tmp_path: Path) -> Path:
    """A model for photographs, with nothing learned."""
    ContinualClassifier(PHOTO, method="ncm").save(tmp_path / "model")
    return tmp_path / "model"


def screenshot(page: Any, name: str) -> None:
    """Save screenshots if they are wanted, and check accessibility if axe-core is there."""
    if not SHOTS and not AXE:
        return
    before = page.viewport_size
    for scheme, width in LAYOUTS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": before["height"]})
        state = f"{name}-{scheme}-{width}"
        if SHOTS:
            page.screenshot(path=f"{SHOTS}/{state}.png", full_page=True)
        if AXE:
            page.evaluate(Path(AXE).read_text("utf-8"))
            violations = page.evaluate("axe.run().then(result => result.violations)")
            found = [(each["id"], [node["html"] for node in each["nodes"]]) for each in violations]
            assert not found, f"{state}: {found}"
    page.emulate_media(color_scheme="null")
    page.set_viewport_size(before)


def send_files(page: Any, target: str, images: list[Any], kind: str) -> None:
    """Drop or paste images on an element."""
    contents = [base64.b64encode(png(image)).decode() for image in images]
    page.evaluate(
        """([target, contents, kind]) => {
            const data = new DataTransfer();
            for (const text of contents) {
                const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
                data.items.add(new File([bytes], "image.png", { type: "image/png" }));
            }
            const options = { bubbles: true, cancelable: true };
            document.querySelector(target).dispatchEvent(kind === "drop"
                ? new DragEvent("drop", { ...options, dataTransfer: data })
                : new ClipboardEvent("paste", { ...options, clipboardData: data }));
        }""",
        [target, contents, kind],
    )


def colours(red: int, green: int, blue: int, count: int = 6) -> list[Any]:
    """Small photographs of one colour, each a little different."""
    random = np.random.default_rng(red)
    noise = random.integers(0, 60, (count, 40, 50, 3))
    return list((noise + np.array([red, green, blue])).astype(np.uint8))


def draw(page: Any, lines: list[list[tuple[float, float]]]) -> None:
    """Draw with the mouse; coordinates are fractions of the canvas."""
    page.locator("#canvas").scroll_into_view_if_needed()
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


def shows(page: Any, selector: str, text: str) -> None:
    """Wait until an element contains a text."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_contain_text(text, use_inner_text=True)


def has_focus(page: Any, selector: str) -> None:
    """Wait until an element has the focus."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_be_focused()


def wait_until_settled(page: Any) -> None:
    """Wait until the newest image has its answer, and no older one can replace it."""
    page.wait_for_selector("#prediction[aria-busy=false]")


def predictions(page: Any) -> list[str]:
    return page.locator("#predictions .name").all_inner_texts()


def wait_for_prediction(page: Any, name: str) -> None:
    wait_for(
        page, "name => document.querySelector('#predictions .name')?.textContent === name", arg=name
    )


def test_predictions_update_while_drawing(page: Any) -> None:
    draw(page, ring(random.Random(0)))
    page.wait_for_selector("#predictions li")
    first = page.locator("#predictions").inner_text()
    assert len(predictions(page)) == 5
    draw(page, [[(0.1, 0.1), (0.9, 0.9)], [(0.1, 0.9), (0.9, 0.1)]])
    wait_for(
        page, "before => document.querySelector('#predictions').innerText !== before", arg=first
    )
    page.click("#undo-stroke")
    page.click("#clear")
    wait_for(page, "document.querySelectorAll('#predictions li').length === 0")


def test_drawing_with_the_keyboard(page: Any) -> None:
    page.focus("#canvas")
    page.keyboard.press(" ")
    for key in ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowUp"):
        for _ in range(5):
            page.keyboard.press(key)
    page.keyboard.press(" ")
    page.wait_for_selector("#predictions li")
    page.fill("#name", "square")
    page.keyboard.press("Enter")
    page.wait_for_selector(".examples img")
    shows(page, ".counter", "1")


def test_view_of_how_an_answer_came_about(browser: Any, page: Any, tmp_path: Path) -> None:
    def explained(page: Any) -> None:
        draw(page, ring(random.Random(0)))
        page.wait_for_selector("#predictions li")
        page.click("#why summary")
        page.wait_for_selector("#explanation table")
        screenshot(page, "explanation")

    explained(page)
    distances = [float(text) for text in page.locator(".distance").all_inner_texts()]
    assert len(distances) > 2
    assert distances == sorted(distances)
    assert page.locator(".prompt-row").count() == 0
    taught([0, 1], method="coda-p", epochs=1).save(tmp_path / "model")
    with (
        served(str(tmp_path / "model")) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        explained(page)
        assert page.locator(".prompt-row").count() == 5  # prompted blocks


def test_unknown_image_opens_a_lesson(page: Any) -> None:
    def as_unknown(route: Any) -> None:
        answer = route.fetch().json()
        answer["predictions"][0].update(unknown=True, label=None)
        route.fulfill(json=answer)

    page.route("**/v1/predict*", as_unknown)
    draw(page, ring(random.Random(0)))
    page.wait_for_selector("#unknown:not([hidden])")
    wait_until_settled(page)
    page.unroute_all(behavior="wait")
    guess = predictions(page)[0]
    shows(page, "#unknown", "I have not seen this before. Teach me?")
    shows(page, "#best-guess", guess)
    page.click("#teach-me")
    has_focus(page, "#name")
    page.wait_for_selector("#pending-image")
    shows(page, "#accept-guess", guess)
    screenshot(page, "unknown")
    page.keyboard.type("my ring")
    page.keyboard.press("Enter")
    page.wait_for_selector(".examples img")
    assert page.locator(".class-name").inner_text() == "my ring"
    page.wait_for_selector("#pending", state="hidden")
    page.click("#teach-me")
    page.click("#accept-guess")
    wait_for(page, "document.querySelectorAll('.class-name').length === 2")
    assert page.locator(".class-name").all_inner_texts() == ["my ring", guess]
    shows(page, "#teach-hint", "4 more of “my ring” needed")


def demo_image(page: Any, tmp_path: Path) -> tuple[Path, str]:
    """Save a test drawing that the demo model predicts correctly; return its path and class."""
    known = set(page.locator("#classes li").all_inner_texts())
    for place, label in enumerate(SOURCE.test.labels):
        name = SOURCE.class_names[label]
        if name in known:
            path = tmp_path / "drawing.png"
            SOURCE.test.image(place).save(path)
            with page.expect_response("**/v1/predict*"):
                page.set_input_files("#predict-file", path)
            wait_until_settled(page)
            if predictions(page)[0] == name:
                return path, name
    raise AssertionError("the demo model predicts no test drawing correctly")


def test_teach_two_classes_and_undo_seen_by_a_second_tab(browser: Any, tmp_path: Path) -> None:
    taught(range(6)).save(tmp_path / "model")
    with (
        served(str(tmp_path / "model")) as client,
        opened(browser, str(client.base_url)) as page,
        opened(browser, str(client.base_url)) as other,
    ):
        wait_for_job(client, teach(client, *drawings([6, 7], 10)))  # some are held out
        path, old = demo_image(page, tmp_path)
        page.fill("#name", old)
        page.click("#add")  # the file that is shown
        page.wait_for_selector(".examples img")
        page.click(".remove-all")
        rng = random.Random(1)
        shapes = {"my zigzag": zigzag, "my grid": grid}
        assert page.locator("#teach").is_disabled()
        for name, shape in shapes.items():
            page.fill("#name", name)
            for _ in range(6):
                draw(page, shape(rng))
                page.click("#add")
        wait_for(page, "document.querySelectorAll('.examples img').length === 12")
        page.wait_for_selector("#teach:enabled")
        screenshot(page, "teaching")
        other.evaluate(  # what is shown for a moment only is in the records too
            """new MutationObserver((records) => {
                const texts = records.flatMap(({ addedNodes }) => [...addedNodes]);
                window.sawProgress ||= records.some(({ target }) => target.id === 'progress');
                window.sawReport ||= texts.some((node) => node.data?.includes('A lesson'));
            }).observe(document.querySelector('#teaching'),
                { subtree: true, attributeFilter: ['hidden'], childList: true })"""
        )
        page.click("#teach")
        for tab in (page, other):
            wait_for(tab, "document.querySelector('#report').textContent.includes('before')")
            assert tab.locator("#report").inner_text().startswith("Learned my zigzag, my grid in")
            wait_for(tab, "document.querySelectorAll('#classes li.new-class').length === 2")
        assert other.evaluate("[window.sawProgress, window.sawReport]") == [True, True]
        for name, shape in shapes.items():
            page.click("#clear")
            draw(page, shape(random.Random(99)))
            wait_for_prediction(page, name)
        screenshot(page, "taught")
        page.set_input_files("#predict-file", path)
        wait_for_prediction(page, old)
        check_history(page)
        page.click("#undo")
        for tab in (page, other):
            wait_for(tab, "!document.querySelector('#classes').textContent.includes('my ')")
        draw(page, zigzag(random.Random(99)))
        wait_until_settled(page)
        assert predictions(page)
        assert "my zigzag" not in predictions(page)
        page.click("#redo")
        wait_for_prediction(page, "my zigzag")
        page.locator("#classes").get_by_role("button", name="my zigzag").click()
        page.click("#why summary")
        shows(page, "#explanation", "my zigzag")
        page.fill("#new-name", "lightning")
        page.press("#new-name", "Enter")
        wait_for_prediction(page, "lightning")
        shows(page, "#explanation", "lightning")
        page.once("dialog", lambda dialog: dialog.accept())
        page.locator("#classes").get_by_role("button", name="lightning").click()
        screenshot(page, "editor")
        page.click("#forget")
        for tab in (page, other):
            wait_for(tab, "!document.querySelector('#classes').textContent.includes('lightning')")
        assert "my grid" in page.locator("#classes").inner_text()


def check_history(page: Any) -> None:
    """Check the view of lessons, accuracy and downloads after a lesson; restore versions."""
    page.click("#learned summary")
    page.wait_for_selector("#learned[data-version]")
    newest = "#lessons tbody tr:first-child"
    shows(page, newest, "my zigzag, my grid")
    shows(page, newest, "→")  # what the lesson cost
    shows(page, newest, "current")
    shows(page, "#class-accuracy", "my grid")
    shows(page, "#confused", "confused")
    screenshot(page, "history")
    with page.expect_download() as download:
        page.click("#download-zip")
    assert download.value.suggested_filename.endswith(".zip")
    shows(page, "#download-hint", "was downloaded")
    page.get_by_role("button", name="Restore").last.click()
    page.wait_for_selector("#classes li.new-class", state="detached")
    shows(page, newest, "undone")
    page.locator(newest).get_by_role("button", name="Restore").click()
    shows(page, newest, "current")
    shows(page, "#classes", "my grid")


def test_teach_photographs_with_camera_drop_and_paste(browser: Any, photo_model: Path) -> None:
    with (
        served(str(photo_model)) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        assert page.locator("h1").inner_text() == "Show and teach"
        for hidden in ("#canvas", "#undo-stroke", "#clear"):
            assert not page.locator(hidden).is_visible()
        shows(page, "#prediction-hint", "not learned anything yet")
        page.click("#camera-toggle")
        page.wait_for_selector("#record:enabled")
        screenshot(page, "camera")
        page.locator("#record").hover()
        page.mouse.down()  # without a name nothing is recorded
        page.mouse.up()
        shows(page, "#error", "class name first")
        page.fill("#name", "clock")
        page.locator("#record").hover()
        page.mouse.down()
        wait_for(page, "document.querySelectorAll('.examples img').length >= 8")
        page.wait_for_selector("#record.recording")
        screenshot(page, "recording")
        page.mouse.up()
        page.wait_for_selector("#record:not(.recording)")
        count = page.locator(".examples img").count()
        page.wait_for_timeout(400)
        assert page.locator(".examples img").count() == count, "recording ends with the press"
        page.fill("#name", "red")
        send_files(page, "#teaching", colours(180, 0, 0), "drop")
        examples = "document.querySelectorAll('.examples img').length"
        wait_for(page, f"{examples} === {count + 6}")
        page.fill("#name", "blue")
        send_files(page, "#name", colours(0, 0, 180), "paste")
        wait_for(page, f"{examples} === {count + 12}")
        assert page.locator(".counter").all_inner_texts() == [str(count), "6", "6"]
        page.click("#teach")
        wait_for(page, "document.querySelectorAll('#classes li').length === 3")
        wait_for_prediction(page, "clock")  # live
        page.click("#camera-toggle")
        wait_for(page, "document.querySelectorAll('#predictions li').length === 0")
        for name, colour in (("red", (180, 0, 0)), ("blue", (0, 0, 180))):
            send_files(page, "#show", colours(*colour, count=1), "drop")
            wait_for_prediction(page, name)
            assert page.locator("#shown").is_visible()
        send_files(page, "body", colours(180, 0, 0, count=1), "paste")
        wait_for_prediction(page, "red")
        screenshot(page, "photographs")


def test_added_example_is_the_image_that_is_shown(browser: Any, photo_model: Path) -> None:
    def is_added(count: int) -> bool:
        page.click("#add")
        wait_for(page, f"document.querySelectorAll('.examples img').length === {count}")
        return page.evaluate(
            """async () => {
                const images = document.querySelectorAll('#shown, .examples img');
                const contents = [...images].map(async ({ src }) => {
                    const content = await (await fetch(src)).arrayBuffer();
                    return new Uint8Array(content).join();
                });
                return await contents[0] === await contents.at(-1);
            }"""
        )

    with (
        served(str(photo_model)) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        learned_colours(client, "red", "blue")
        wait_for(page, "document.querySelectorAll('#classes li').length === 2")
        page.fill("#name", "green")
        page.route("**/v1/predict*", lambda route: route.abort())
        send_files(page, "#show", colours(0, 180, 0, count=1), "drop")  # the first image fails
        shows(page, "#error", "The service does not answer.")
        assert is_added(1)
        page.unroute_all(behavior="wait")
        send_files(page, "#show", colours(180, 0, 0, count=1), "drop")
        wait_for_prediction(page, "red")
        before = page.locator("#shown").get_attribute("src")
        page.route("**/v1/predict*", lambda route: None)  # no answer yet
        send_files(page, "#show", colours(0, 0, 180, count=1), "drop")
        wait_for(page, "before => document.querySelector('#shown').src !== before", arg=before)
        assert predictions(page) == []
        assert is_added(2)


def learned_colours(client: Any, *names: str) -> None:
    """Teach a model classes of one colour each, over HTTP."""
    values = {"red": (180, 0, 0), "blue": (0, 0, 180), "green": (0, 180, 0)}
    images = [image for name in names for image in colours(*values[name])]
    wait_for_job(client, teach(client, images, [name for name in names for _ in range(6)]))


def test_merge_classes_and_close_the_editor(browser: Any, photo_model: Path) -> None:
    with (
        served(str(photo_model)) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        learned_colours(client, "red", "blue", "green")
        chips = page.locator("#classes")
        chips.get_by_role("button", name="red").click()
        has_focus(page, "#new-name")
        page.keyboard.press("Escape")
        page.wait_for_selector("#class-editor", state="hidden")
        has_focus(page, "#classes [data-name=red]")
        page.keyboard.press("Enter")
        assert page.locator("#merge-into option").all_inner_texts() == ["blue", "green"]
        page.select_option("#merge-into", "blue")
        screenshot(page, "merge")
        page.click("#merge")
        shows(page, "#edit-report", "red was merged into blue.")
        has_focus(page, "#classes")
        assert chips.locator("li").all_inner_texts() == ["blue", "green"]
        send_files(page, "#show", colours(180, 0, 0, count=1), "drop")
        wait_for_prediction(page, "blue")
        page.dblclick("#undo")  # the second click finds the first at work
        wait_for_prediction(page, "red")
        shows(page, "#edit-report", "The last change was undone.")
        assert chips.locator("li").count() == 3


def test_lesson_in_progress_and_failed_lesson(browser: Any, photo_model: Path) -> None:
    with (
        served(str(photo_model)) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        learned_colours(client, "red", "blue")
        wait_for(page, "document.querySelectorAll('#classes li').length === 2")
        page.fill("#name", "Red")  # the known class with another capital
        send_files(page, "#teaching", colours(180, 0, 0, count=1), "drop")
        shows(page, "#name-hint", "“red” is known already")
        page.wait_for_selector(".class-name")  # the file is read after the name is compared
        assert page.locator(".class-name").all_inner_texts() == ["red"]
        with ModelFolder(photo_model).writing():  # as another command that changes the model
            page.click("#teach")
            shows(page, "#error", "The lesson failed: ")
            shows(page, "#error", "your examples are kept")
            screenshot(page, "failed")
        assert page.locator(".counter").all_inner_texts() == ["1"]
        (learner,) = children_of(client.pid)
        os.kill(learner, signal.SIGSTOP)
        try:
            page.click("#teach:enabled")
            page.wait_for_selector("#progress:not([hidden])")
            screenshot(page, "learning")
            assert page.locator("#teach").is_disabled()
            page.fill("#name", "green")
            send_files(page, "#teaching", colours(0, 180, 0, count=2), "drop")
            wait_for(page, "document.querySelectorAll('.strip').length === 2")
            page.locator("#classes").get_by_role("button", name="blue").click()
            page.fill("#new-name", "sea")
            page.keyboard.press("Enter")
            shows(page, "#error", "A lesson is running. Wait until it ends.")
        finally:
            os.kill(learner, signal.SIGCONT)
        shows(page, "#report", "Learned red in")
        # What was added meanwhile is not lost.
        assert page.locator(".class-name").all_inner_texts() == ["green"]
        assert page.locator(".counter").all_inner_texts() == ["2"]


def test_files_and_names_that_cannot_be_used(browser: Any, photo_model: Path) -> None:
    with (
        served(str(photo_model)) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        page.fill("#name", "🦊" * 101)
        send_files(page, "#teaching", colours(180, 0, 0, count=1), "drop")
        shows(page, "#error", "A class name has at most 100 characters; this one has 101.")
        page.fill("#name", "🦊")
        page.set_input_files(
            "#add-files",
            [
                {"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"},
                {"name": "grey.tiff", "mimeType": "image/tiff", "buffer": tiff()},
            ],
        )
        shows(page, "#error", "Not added, 1 of 2 files:\nnotes.png: it is not an image")
        assert page.locator(".counter").all_inner_texts() == ["1"]
        # The browser cannot show TIFF: the service has converted it.
        image = ".examples img"
        assert page.locator(image).evaluate("image => image.naturalWidth") == 30
        send_files(page, "#show", colours(180, 0, 0, count=3), "drop")
        shows(page, "#error", "Of 3 files, image.png was classified.")
        page.get_by_role("button", name="Remove all examples of 🦊").click()
        shows(page, "#teach-hint", "No examples yet.")
        assert page.locator(".strip").count() == 0


def tiff() -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (30, 20), 128).save(buffer, "TIFF")
    return buffer.getvalue()


def test_service_that_is_killed_during_a_lesson(browser: Any, photo_model: Path) -> None:
    port = str(20_000 + (os.getpid() + 1) % 10_000)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(served(str(photo_model), "--port", port))
        page = stack.enter_context(opened(browser, str(client.base_url)))
        page.fill("#name", "red")
        send_files(page, "#teaching", colours(180, 0, 0), "drop")
        page.wait_for_selector("#teach:enabled")
        client.get("/v1/model")
        (learner,) = children_of(client.pid)
        os.kill(learner, signal.SIGSTOP)
        page.click("#teach")
        page.wait_for_selector("#progress:not([hidden])")
        os.kill(client.pid, signal.SIGKILL)
        page.wait_for_selector("#gone:not([hidden])")
        os.kill(learner, signal.SIGCONT)
        shows(page, "#teach-hint", "Waiting for the service")
        stack.enter_context(served(str(photo_model), "--port", port))
        shows(page, "#report", "The service was stopped during the lesson.")
        assert page.locator(".counter").all_inner_texts() == ["6"]
        page.click("#teach:enabled")
        shows(page, "#report", "Learned red in")


def test_camera_that_is_not_allowed(page: Any, demo_url: str) -> None:
    page.add_init_script(
        "navigator.mediaDevices.getUserMedia = async () => "
        "{ throw new DOMException('Permission denied', 'NotAllowedError'); }"
    )
    page.goto(f"{demo_url}models/photographs/")
    page.wait_for_selector("body[data-ready]")
    page.click("#camera-toggle")
    shows(page, "#error", "The browser does not let this page use the camera.")
    shows(page, "#error", "Photographs from files work without a camera.")
    screenshot(page, "no-camera")


def tab_to(page: Any, selector: str) -> None:
    """Move the focus with the tab key until it is on an element."""
    for _ in range(200):
        if page.evaluate("each => document.activeElement.matches(each)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"the tab key does not reach {selector}")


def test_teach_a_drawing_with_the_keyboard_only(browser: Any, tmp_path: Path) -> None:
    taught(range(3)).save(tmp_path / "model")
    with (
        served(str(tmp_path / "model")) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        for number in range(5):
            tab_to(page, "#canvas")
            page.keyboard.press(" ")
            for key in ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowUp"):
                for _ in range(5 + number):
                    page.keyboard.press(key)
            page.keyboard.press(" ")
            tab_to(page, "#name")
            if not number:
                page.keyboard.type("square")
            page.keyboard.press("Enter")
        tab_to(page, "#teach")
        page.keyboard.press("Enter")
        shows(page, "#report", "Learned square in")
        tab_to(page, "#classes [data-name=square]")


def test_teach_a_photograph_with_the_keyboard_only(browser: Any, photo_model: Path) -> None:
    with (
        served(str(photo_model)) as client,
        opened(browser, str(client.base_url)) as page,
    ):
        tab_to(page, "#camera-toggle")
        page.keyboard.press("Enter")
        page.wait_for_selector("#record:enabled")
        tab_to(page, "#name")
        page.keyboard.type("clock")
        tab_to(page, "#record")
        page.keyboard.down(" ")
        wait_for(page, "document.querySelectorAll('.examples img').length >= 6")
        page.keyboard.up(" ")
        page.wait_for_selector("#record:not(.recording)")
        tab_to(page, ".example")
        before = page.locator(".example").count()
        page.keyboard.press("Enter")  # removes the first, and the focus is on the next
        wait_for(page, f"document.querySelectorAll('.example').length === {before - 1}")
        has_focus(page, ".example >> nth=0")
        tab_to(page, "#teach")
        page.keyboard.press("Enter")
        shows(page, "#report", "Learned clock in")
        has_focus(page, "#teach-hint")
        shows(page, "#prediction-hint", "knows one class only")
        tab_to(page, "#undo")  # the first lesson, too
        page.keyboard.press("Enter")
        shows(page, "#count", "(0)")
        assert page.locator("#report").text_content() == ""
        shows(page, "#prediction-hint", "not learned anything yet")
        has_focus(page, "#redo")
        page.keyboard.press("Enter")
        shows(page, "#count", "(1)")
        has_focus(page, "#undo")


def test_page_shows_that_the_service_is_gone_and_what_it_has_lost(
    browser: Any, photo_model: Path, tmp_path: Path
) -> None:
    anew = shutil.copytree(photo_model, tmp_path / "anew")  # as a temporary model begins
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(contextlib.ExitStack())
        port = str(20_000 + os.getpid() % 10_000)  # one that the system gives to nobody meanwhile
        client = service.enter_context(served(str(photo_model), "--port", port))
        page = stack.enter_context(opened(browser, str(client.base_url)))
        assert not page.locator("#unknown-hint").is_visible()
        learned_colours(client, "blue", "green")
        # 19 are needed
        shows(page, "#unknown-hint", "the model needs at least 7 more examples")
        page.fill("#name", "red")
        send_files(page, "#teaching", colours(180, 0, 0), "drop")
        page.wait_for_selector("#teach:enabled")
        service.close()
        page.wait_for_selector("#gone:not([hidden])")
        page.wait_for_selector("#teach:disabled")
        screenshot(page, "gone")
        stack.enter_context(served(str(anew), "--port", port))
        page.wait_for_selector("#gone", state="hidden")
        shows(page, "#lost", "does not know these classes any more: blue, green.")
        screenshot(page, "lost")
        page.click("#close-lost")
        page.wait_for_selector("#lost", state="hidden")
        page.click("#teach:enabled")
        wait_for(page, "document.querySelectorAll('#classes li').length === 1")


def test_errors_are_shown(page: Any, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.png"
    wrong.write_text("no image")
    page.set_input_files("#predict-file", wrong)
    shows(page, "#error", "it is not an image that can be read")
    screenshot(page, "error")
    draw(page, ring(random.Random(0)))
    page.wait_for_selector("#error", state="hidden")
    page.click("#add")
    shows(page, "#error", "class name first")


def test_keyboard_navigation(page: Any) -> None:
    page.focus("#name")
    page.keyboard.type("thing")
    page.keyboard.press("Enter")
    shows(page, "#error", "Draw an example first")
    reached = set()
    for _ in range(150):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"canvas", "undo-stroke", "clear", "predict-file", "name", "add", "add-files"} <= reached
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input')].filter(e => e.checkVisibility() && "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize(("scheme", "width"), LAYOUTS)
def test_light_dark_and_phone_layout(scheme: str, width: int, browser: Any, demo_url: str) -> None:
    options = {
        "color_scheme": scheme,
        "viewport": {"width": width, "height": 844},
        "has_touch": width < 500,
    }
    with opened(browser, demo_url, **options) as page:
        draw(page, ring(random.Random(0)))
        page.wait_for_selector("#predictions li")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(part) for part in ground[4:-1].split(",")) > 380
        assert bright == (scheme == "light")
        wider = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        assert not wider, "nothing is cut off"


def test_page_names_its_kind_of_images_and_links_to_the_other_model(page: Any) -> None:
    screenshot(page, "start")
    shows(page, "#kind", "This model is for drawings.")
    page.get_by_role("link", name="photographs").click()
    page.wait_for_selector("body[data-ready]")
    shows(page, "#kind", "This model is for photographs.")
    shows(page, "#models [aria-current=page]", "photographs")
    screenshot(page, "start-photographs")
    page.get_by_role("link", name="drawings").click()
    page.wait_for_selector("#canvas")


def test_token_can_be_entered_on_the_page(browser: Any, tmp_path: Path) -> None:
    taught(range(6)).save(tmp_path)
    with served(str(tmp_path), CODA_TOKEN="correct horse") as client:
        page = browser.new_context().new_page()
        page.goto(str(client.base_url))
        page.wait_for_selector("#token-form:not([hidden])")
        screenshot(page, "token")
        page.fill("#token", "correct horse")
        page.click("#token-form button")
        wait_for(page, "document.querySelectorAll('#classes li').length === 6")
        assert NAMES[0] in page.locator("#classes").inner_text()


def test_api_docs_are_shown(browser: Any, demo_url: str) -> None:
    page = browser.new_context().new_page()
    lines: list[str] = []
    page.on("console", lambda line: lines.append(line.text))
    page.goto(f"{demo_url}docs", timeout=TIMEOUT)
    page.locator("#operations-default-predict_v1_predict_post").click(timeout=TIMEOUT)
    page.wait_for_selector(".execute, .try-out", timeout=TIMEOUT)
    page.context.close()
    assert lines == []
