"""Measure the service under load: its options, while it learns, and its model alone.

    python benchmarks/load.py [--requests 1500] [--callers 32] [--lessons-only] [--out FILE]

Each service runs in its own process, as started by `coda serve`; this process sends the requests.
The services are measured alternately, and medians over rounds are reported. The models are that
of the demo page for drawings, and for photographs one on `photo` that has learned two classes.

What limits the throughput follows from the images a second that the model alone classifies in
batches of several sizes, and the files a second that are decoded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from services import service
from speed import machine, show
from teach import photographs

from coda_prompt import ContinualClassifier
from coda_prompt.cli.serve import DEMO_MODEL
from coda_prompt.storage.files import write_atomically

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from drawings import drawings  # type: ignore[import-not-found]
from serving import png, teach, wait_for_job  # type: ignore[import-not-found]

ROUNDS = 3
SERVICES = ("--batching", "--no-batching", "--precision 32-true")
"""Options of the services that are compared; the last one has batching, too."""
ROUNDING = {"drawings": 1e-4, "photographs": 1e-3}
"""By how much probabilities may differ between batches; photographs may be in bfloat16."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


async def load(
    address: httpx.URL, bodies: list[bytes], requests: int, callers: int, path: str = "/v1/predict"
) -> dict[str, Any]:
    """Send requests from concurrent callers, each as soon as its last one is answered.

    Requests are encoded in advance and responses parsed by hand: a client library would use more of
    the two cores than the service.
    """
    encoded = []
    for body in bodies:
        request = httpx.Request("POST", address.join(path), files=[("images", ("a.png", body))])
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in request.headers.items())]
        encoded.append("\r\n".join([*lines, "", ""]).encode() + request.read())
    responses: list[tuple[int, int, bytes]] = []
    latencies: list[float] = []
    left = iter(range(requests))

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for number in left:
            index = number % len(bodies)
            started = time.perf_counter()
            writer.write(encoded[index])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            latencies.append(time.perf_counter() - started)
            responses.append((index, int(head.split()[1]), content))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds = time.perf_counter() - started
    answers = [(index, status, json.loads(content)) for index, status, content in responses]
    return {"answers": answers, "rate": requests / seconds, "latencies": latencies}


def throughput(
    model: str, folder: Path, bodies: list[bytes], requests: int, callers: int
) -> list[Any]:
    """Compare requests per second and latency of services with different options."""
    rates: dict[str, list[float]] = {name: [] for name in SERVICES}
    latencies: dict[str, list[float]] = {name: [] for name in SERVICES}
    with contextlib.ExitStack() as running:
        clients = {
            name: running.enter_context(service(str(folder), *name.split())) for name in SERVICES
        }
        for turn in range(ROUNDS + 1):
            for name, client in clients.items():
                run = asyncio.run(load(client.base_url, bodies, requests, callers))
                assert all(status == 200 for _, status, _ in run["answers"])
                if turn:
                    rates[name].append(run["rate"])
                    latencies[name] += run["latencies"]
    base = statistics.median(rates["--no-batching"])
    return [
        {
            "model": model,
            "service": name,
            "callers": callers,
            "requests a second": statistics.median(measured),
            **percentiles(latencies[name]),
            "times faster": statistics.median(measured) / base,
        }
        for name, measured in rates.items()
    ]


def percentiles(latencies: list[float]) -> dict[str, float]:
    """Return the columns of latencies, in milliseconds."""
    columns = {"median ms": 50, "95th percentile ms": 95, "99th percentile ms": 99}
    return {
        name: 1e3 * float(np.percentile(latencies, percent)) for name, percent in columns.items()
    }


def model_alone(folder: Path, bodies: list[bytes]) -> list[dict[str, Any]]:
    """Measure how many images a second are decoded, and classified in batches of several sizes."""
    classifier = ContinualClassifier.load(folder, verbose=False)
    images = [np.asarray(Image.open(io.BytesIO(body))) for body in bodies]
    rows = [{"step": "decode", "images a second": rate_of(lambda: decode(bodies), len(bodies))}]
    for size in BATCH_SIZES:
        batch = [images[index % len(images)] for index in range(size)]
        rate = rate_of(partial(classifier.predict, batch), size)
        rows.append({"step": f"classify {size} at once", "images a second": rate})
    return rows


def decode(bodies: list[bytes]) -> None:
    for body in bodies:
        Image.open(io.BytesIO(body)).convert("RGB").load()


def rate_of(work: Callable[[], object], images: int) -> float:
    """Return images a second, the median of a few calls after a first one."""
    seconds = []
    for _ in range(2 * ROUNDS + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return images / statistics.median(seconds[1:])


def demo_model(folder: Path) -> Any:
    """Copy the demo model; return images to classify and two lessons."""
    with resources.as_file(resources.files("coda_prompt") / "assets" / DEMO_MODEL) as demo:
        shutil.copytree(demo, folder)
    lessons = [drawings(range(first, first + 5), 20) for first in (50, 60)]
    return drawings(range(40), 2, test=True)[0], lessons


def photo_model(folder: Path) -> Any:
    """Teach a model two classes of photographs; return images to classify and two lessons."""
    classes = [
        [np.asarray(Image.open(io.BytesIO(file))) for file in photographs(n)] for n in range(6)
    ]
    tasks = []
    for first in (0, 2, 4):
        names = [f"class {first + n // len(classes[0])}" for n in range(2 * len(classes[0]))]
        tasks.append((classes[first] + classes[first + 1], names))
    classifier = ContinualClassifier("photo", verbose=False)
    classifier.learn(*tasks[0])
    classifier.save(folder)
    return [image for images in classes for image in images[:4]], tasks[1:]


def while_learning(
    name: str, folder: Path, images: Any, lessons: Any, requests: int, callers: int
) -> dict[str, Any]:
    """Check that every answer during two lessons is that of the model version it names."""
    bodies = [png(image) for image in images]
    versions = [ContinualClassifier.load(folder)]
    with service(str(folder)) as client:
        jobs = []

        async def both() -> dict[str, Any]:
            async def teach_lessons() -> None:
                for lesson in lessons:
                    job = await asyncio.to_thread(teach, client, *lesson)
                    jobs.append(await asyncio.to_thread(wait_for_job, client, job))
                    versions.append(await asyncio.to_thread(ContinualClassifier.load, folder))

            requested = load(client.base_url, bodies, requests, callers, "/v1/predict?top=100")
            run, _ = await asyncio.gather(requested, teach_lessons())
            return run

        run = asyncio.run(both())
    expected = {len(each.tasks_): (each.classes_, each.predict_proba(images)) for each in versions}
    wrong = 0
    answers_by_version: dict[str, int] = {}
    for index, status, answer in run["answers"]:
        tasks = int(answer["version"].split("-")[0])
        answers_by_version[answer["version"]] = answers_by_version.get(answer["version"], 0) + 1
        classes, probabilities = expected[tasks]
        returned = {each["label"]: each["probability"] for each in answer["predictions"][0]["top"]}
        values = np.array([returned.get(name, np.nan) for name in classes])
        wrong += status != 200 or not np.allclose(values, probabilities[index], atol=ROUNDING[name])
    return {
        "model": name,
        "requests": requests,
        "answered": len(run["answers"]),
        "wrong": wrong,
        "lessons": ", ".join(job["state"] for job in jobs),
        "versions": json.dumps(answers_by_version),
        "requests a second": run["rate"],
        **percentiles(run["latencies"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--lessons-only", action="store_true", help="Leave out the throughput.")
    parser.add_argument("--during", type=int, default=5000, help="Requests during the lessons.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/load.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as temporary:
        drawings_folder, photo_folder = Path(temporary) / "drawings", Path(temporary) / "photo"
        images, lessons = demo_model(drawings_folder)
        photos, photo_lessons = photo_model(photo_folder)
        if not options.lessons_only:
            results["throughput"], results["model alone"] = [], []
            for name, folder, shown, requests in (
                ("drawings", drawings_folder, images, options.requests),
                ("photographs", photo_folder, photos, options.requests // 4),
            ):
                bodies = [png(image) for image in shown]
                results["throughput"] += throughput(name, folder, bodies, requests, options.callers)
                results["model alone"] += [
                    {"model": name, **r} for r in model_alone(folder, bodies)
                ]
            show(results["throughput"], "Throughput")
            show(results["model alone"], "The model alone")
        results["while learning"] = [
            while_learning(name, folder, *data, options.during, options.callers)
            for name, folder, data in (
                ("drawings", drawings_folder, (images, lessons)),
                ("photographs", photo_folder, (photos, photo_lessons)),
            )
        ]
        show(results["while learning"], "While it learns")
    write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()
