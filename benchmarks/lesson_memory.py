"""Peak memory of a lesson of large photographs, above the loaded model.

    python benchmarks/lesson_memory.py [--photographs 60] [--megapixels 12] [--method ranpac]

Writes JPEG files of noise blurred to look like photographs in four class folders, loads the `photo`
backbone, classifies one image so that everything is loaded, and learns the folder in this process.
Peak resident memory of the process (workers, if any, are added) is read from the operating system;
Linux only. Results on the development machine are in docs/lab/photo-backbone.md.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from speed import show

from coda_prompt import ContinualClassifier

CLASSES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--photographs", type=int, default=60)
    parser.add_argument("--megapixels", type=float, default=12.0)
    parser.add_argument("--method", default="ranpac")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder, options.photographs, options.megapixels)
        classifier = ContinualClassifier("photo", options.method, device="cpu", verbose=False)
        small = [photograph(seed, 224, 224) for seed in range(4)]
        classifier.learn(small, ["a", "a", "b", "b"])
        classifier.predict(small[0])
        loaded = resident()
        reset_peak()
        learned = classifier.learn(folder)
        figures = {
            "method": options.method,
            "photographs": options.photographs,
            "megapixels": options.megapixels,
            "loaded_megabytes": loaded,
            "peak_above_megabytes": peak() - loaded + workers(),
            "seconds": learned.seconds,
        }
    show([figures], "Peak memory of a lesson")


def write_photographs(folder: Path, count: int, megapixels: float) -> None:
    height = round((megapixels * 1e6 * 3 / 4) ** 0.5)
    for number in range(count):
        path = folder / f"class {number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        photograph(number, height * 4 // 3, height).save(path, quality=90)


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """Random colours that change over about a tenth of the image."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 10, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def resident() -> float:
    """Megabytes of the process now."""
    return status("VmRSS")


def peak() -> float:
    """Megabytes of the process at most since `reset_peak`."""
    return status("VmHWM")


def status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("This benchmark reads /proc/self/status: it needs Linux.")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def workers() -> float:
    """Megabytes of the largest process that this one started and that has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
