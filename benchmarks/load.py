"""The service under load: batching on and off, and answers while it learns.

    python benchmarks/load.py [--requests 1500] [--callers 32] [--out FILE]

Each service runs in its own process, as `coda serve` starts it; callers are in processes of their
own. The two take turns; medians of their rounds count. The model is the one the demo page has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from coda_prompt.cli.serve import DEMO
from coda_prompt.storage.files import write_atomically

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from drawings import drawings  # type: ignore[import-not-found]
from serving import ended, png, served, teach  # type: ignore[import-not-found]

ROUNDS = 3


async def load(
    address: httpx.URL, bodies: list[bytes], requests: int, callers: int, path: str = "/v1/predict"
) -> dict[str, Any]:
    """As many requests as fast as these callers get answers.

    Requests are made beforehand and answers read by hand: a client library would need more of the
    two cores than the service.
    """
    made = []
    for body in bodies:
        request = httpx.Request("POST", address.join(path), files=[("images", ("a.png", body))])
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in request.headers.items())]
        made.append("\r\n".join([*lines, "", ""]).encode() + request.read())
    told: list[tuple[int, int, bytes]] = []
    waited: list[float] = []
    left = iter(range(requests))

    async def caller() -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for number in left:
            place = number % len(bodies)
            started = time.perf_counter()
            writer.write(made[place])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            waited.append(time.perf_counter() - started)
            told.append((place, int(head.split()[1]), content))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    seconds = time.perf_counter() - started
    answers = [(place, status, json.loads(content)) for place, status, content in told]
    return {"answers": answers, "rate": requests / seconds, "waited": waited}


def throughput(folder: Path, bodies: list[bytes], requests: int, callers: int) -> list[Any]:
    rates: dict[str, list[float]] = {"--batching": [], "--no-batching": []}
    waits: dict[str, list[float]] = {name: [] for name in rates}
    threads = {"OMP_NUM_THREADS": f"{os.cpu_count()}"}
    with (
        served(str(folder), "--batching", **threads) as on,
        served(str(folder), "--no-batching", **threads) as off,
    ):
        for turn in range(ROUNDS + 1):
            for name, client in (("--batching", on), ("--no-batching", off)):
                found = asyncio.run(load(client.base_url, bodies, requests, callers))
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

            everything = "/v1/predict?top=100"
            asked = load(client.base_url, bodies, requests, callers, everything)
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
