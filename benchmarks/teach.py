"""Measure how long a lesson takes: from the request to the first answer with the new class.

    python benchmarks/teach.py [--lessons 5] [--photo BACKBONE] [--out FILE]

The service runs in its own process, as started by `coda serve` without a model. Each lesson has 12
images of a new class: drawings of pocket, or crops of a photograph as the page sends them. The
learning process is warm: the first lesson of each model is not counted.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from matplotlib.cbook import get_sample_data
from PIL import Image
from services import service
from speed import machine, show

from coda_prompt.cli.serve import PHOTOGRAPHS
from coda_prompt.storage.files import write_atomically

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from drawings import drawings  # type: ignore[import-not-found]
from serving import png  # type: ignore[import-not-found]

IMAGES = 12
FRAME = 320
"""Pixels of a square frame of the page's camera."""
INTERVAL = 0.02
"""Seconds between two requests for an answer."""


def photographs(number: int) -> list[bytes]:
    """Return crops of a part of a photograph as JPEG files; each number has its own colours."""
    random = np.random.default_rng(number)
    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as file:
        picture = np.roll(np.asarray(file.convert("RGB")), number, axis=2) ^ (number // 3 * 37)
    top = random.integers(0, picture.shape[0] - FRAME - 40)
    left = random.integers(0, picture.shape[1] - FRAME - 40)
    files = []
    for down, right in random.integers(0, 40, (IMAGES, 2)):
        crop = picture[top + down :, left + right :][:FRAME, :FRAME]
        buffer = io.BytesIO()
        Image.fromarray(crop).save(buffer, "JPEG", quality=92)
        files.append(buffer.getvalue())
    return files


def sketches(number: int) -> list[bytes]:
    """Return drawings of a class that the demo model does not know."""
    return [png(image) for image in drawings([99 - number], IMAGES)[0]]


def seconds_to_answer(client: httpx.Client, path: str, images: list[bytes], name: str) -> float:
    """Teach a class and return the time until the service answers with it."""
    body = [("images", ("image", image)) for image in images]
    started = time.perf_counter()
    sent = client.post(f"{path}v1/learn", files=body, data={"labels": [name]})
    sent.raise_for_status()
    version = client.get(f"{path}v1/classes").json()["version"]
    while True:
        answer = client.post(f"{path}v1/predict", files=body[:1])
        if answer.status_code == 200 and answer.json()["predictions"][0]["best"] == name:
            break
        job = client.get(f"{path}v1/jobs/{sent.json()['id']}").json()
        assert job["state"] != "failed", job
        assert answer.status_code == 409 or answer.json()["version"] == version, "a wrong answer"
        time.sleep(INTERVAL)
    seconds = time.perf_counter() - started
    client.get(f"{path}v1/jobs/{sent.json()['id']}/events")  # until all of the lesson is done
    return seconds


def measure(client: httpx.Client, kind: str, path: str, make: Any, lessons: int) -> dict[str, Any]:
    """Teach one class after the other."""
    described = client.get(f"{path}v1/model").json()
    times = [
        seconds_to_answer(client, path, make(number), f"class {number}")
        for number in range(lessons + 1)
    ][1:]
    return {
        "images": f"{IMAGES} {kind}",
        "model": f"{described['method']} on {described['backbone']}",
        "median s": statistics.median(times),
        "slowest s": max(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lessons", type=int, default=5)
    parser.add_argument("--photo", help="Backbone for photographs; default: the embedded one.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    backbone = ("--backbone", options.photo) if options.photo else ()
    with service(*backbone) as client:
        rows = [
            measure(client, "drawings", "/", sketches, options.lessons),
            measure(client, "photographs", f"/models/{PHOTOGRAPHS}/", photographs, options.lessons),
        ]
    show(rows, "From Teach to the first answer with the new class")
    if options.out:
        content = {"machine": machine(), "teach": rows}
        write_atomically(options.out, (json.dumps(content, indent=2) + "\n").encode())


if __name__ == "__main__":
    main()
