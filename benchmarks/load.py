"""The service under load: batching on and off, and answers while it learns.

    python benchmarks/load.py [--requests 1500] [--callers 32] [--out FILE]

Each service runs in its own process, as `coda serve` starts it; callers are in processes of their
own. The two take turns; medians of their rounds count. The model is the one the demo page has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from speed import machine, show

from coda_prompt import ContinualClassifier
from coda_prompt.files import write_atomically
from coda_prompt.serve.command import DEMO

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from drawings import drawings  # type: ignore[import-not-found]
from serving import ended, png, served, teach  # type: ignore[import-not-found]

ROUNDS = 3


async def load(address: str, bodies: list[bytes], requests: int, callers: int) -> dict[str, Any]:
    """As many requests as fast as these callers get answers."""
    answers: list[tuple[int, int, dict[str, Any]]] = []
    waited: list[float] = []
    left = iter(range(requests))
    limits = httpx.Limits(max_connections=callers)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:

        async def caller() -> None:
            for number in left:
                place = number % len(bodies)
                started = time.perf_counter()
                answer = await client.post(
                    "/v1/predict?top=100", files=[("images", ("a.png", bodies[place]))]
                )
                waited.append(time.perf_counter() - started)
                answers.append((place, answer.status_code, answer.json()))

        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        seconds = time.perf_counter() - started
    return {"answers": answers, "rate": requests / seconds, "waited": waited}


def throughput(folder: Path, bodies: list[bytes], requests: int, callers: int) -> list[Any]:
    rates: dict[str, list[float]] = {"--batching": [], "--no-batching": []}
    waits: dict[str, list[float]] = {name: [] for name in rates}
    with served(str(folder), "--batching") as on, served(str(folder), "--no-batching") as off:
        for turn in range(ROUNDS + 1):
            for name, client in (("--batching", on), ("--no-batching", off)):
                found = asyncio.run(load(str(client.base_url), bodies, requests, callers))
                assert all(status == 200 for _, status, _ in found["answers"])
                if turn:
                    rates[name].append(found["rate"])
                    waits[name] += found["waited"]
    base = statistics.median(rates["--no-batching"])
    return [
        {
            "service": name,
            "callers": callers,
            "requests a second": statistics.median(own),
            "median ms": 1e3 * statistics.median(waits[name]),
            "99th percentile ms": 1e3 * float(np.percentile(waits[name], 99)),
            "times faster": statistics.median(own) / base,
        }
        for name, own in rates.items()
    ]


def while_learning(folder: Path, images: Any, requests: int, callers: int) -> list[Any]:
    """Every answer must be that of the version it names."""
    bodies = [png(image) for image in images]
    versions = [ContinualClassifier.load(folder)]
    with served(str(folder)) as client:
        lessons = [drawings(range(first, first + 5), 20) for first in (50, 60)]
        jobs = []

        async def both() -> dict[str, Any]:
            async def lessons_too() -> None:
                for lesson in lessons:
                    job = await asyncio.to_thread(teach, client, *lesson)
                    jobs.append(await asyncio.to_thread(ended, client, job))
                    versions.append(await asyncio.to_thread(ContinualClassifier.load, folder))

            asked = load(str(client.base_url), bodies, requests, callers)
            found, _ = await asyncio.gather(asked, lessons_too())
            return found

        found = asyncio.run(both())
    expected = {len(each.tasks_): (each.classes_, each.predict_proba(images)) for each in versions}
    wrong = 0
    named: dict[str, int] = {}
    for place, status, told in found["answers"]:
        tasks = int(told["version"].split("-")[0])
        named[told["version"]] = named.get(told["version"], 0) + 1
        classes, chances = expected[tasks]
        given = {each["label"]: each["probability"] for each in told["predictions"][0]["top"]}
        values = np.array([given.get(name, np.nan) for name in classes])
        wrong += status != 200 or not np.allclose(values, chances[place], atol=1e-4)
    return [
        {
            "requests": requests,
            "answered": len(found["answers"]),
            "wrong": wrong,
            "lessons": ", ".join(job["state"] for job in jobs),
            "versions": json.dumps(named),
            "requests a second": found["rate"],
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/load.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        with resources.as_file(resources.files("coda_prompt") / "assets" / DEMO) as demo:
            shutil.copytree(demo, folder)
        images, _ = drawings(range(40), 2, test=True)
        bodies = [png(image) for image in images]
        rates = throughput(folder, bodies, options.requests, options.callers)
        show(rates, "Throughput")
        during = while_learning(folder, images, 5000, options.callers)
        show(during, "While it learns")
    found = {"machine": machine(), "throughput": rates, "while learning": during}
    write_atomically(options.out, json.dumps(found, indent=1).encode())


if __name__ == "__main__":
    main()
