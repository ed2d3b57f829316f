"""Measure inference by torch, ONNX Runtime and in int8, and a cold `coda predict`.

    python benchmarks/inference.py [--data DIR] [--quick] [--only PART,...] [--out FILE]

`DIR` has CIFAR-100 as arrays (tools/photo_data.py writes them; default: /opt/data). Variants are
measured alternately; medians are reported. CPU time is that of all threads: on a busy machine use
`--threads 1` and compare CPU time.
"""

from __future__ import annotations

import argparse
import compileall
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import (
    quant_pre_process,
)
from speed import machine, show
from torch import Tensor, nn

import coda_prompt
from coda_prompt import ContinualClassifier
from coda_prompt.images.inputs import as_image
from coda_prompt.images.preprocessing import eval_view
from coda_prompt.research.vit.vit import ViT, ViTConfig
from coda_prompt.storage.files import write_atomically

Array = NDArray[Any]
Run = Callable[[Tensor], Tensor]
BATCHES = (1, 32)
CALIBRATION_IMAGES = 128
LAYERS = ["MatMul", "Gemm", "Conv"]
"""Operators in int8: the products. Norms, softmax and GELU stay in float32."""


# -- variants


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Held-out images, sixteen at a time."""

    def __init__(self, images: Tensor) -> None:
        self.batches: Iterator[Tensor] = iter(images.split(16))

    def get_next(self) -> dict[str, Array] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"images": batch.numpy()}


def export(module: nn.Module, example: Tensor, path: Path) -> None:
    """Write a module from images to one output as ONNX."""
    with torch.no_grad():
        module(example)  # compute lazily created buffers before tracing
        torch.onnx.export(
            module,
            (example,),
            path,
            input_names=["images"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def onnx_run(path: Path, threads: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads would wait busily and slow down what is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def torch_run(module: nn.Module, *, bfloat16: bool = False, onednn: bool = True) -> Run:
    def run(images: Tensor) -> Tensor:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
            torch.backends.mkldnn.flags(enabled=onednn),
        ):
            outputs: Tensor = module(images)
        return outputs.float()

    return run


def variants(module: nn.Module, held_out: Tensor, folder: Path, threads: int) -> dict[str, Run]:
    """Return ways to compute the same outputs; the first one is torch in float32."""
    plain, prepared = folder / "float32.onnx", folder / "prepared.onnx"
    dynamic, static = folder / "dynamic.onnx", folder / "static.onnx"
    export(module, held_out[:2], plain)
    quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    quantize_dynamic(prepared, dynamic, op_types_to_quantize=LAYERS[:2], per_channel=True)
    quantize_static(
        prepared,
        static,
        Calibration(held_out),
        op_types_to_quantize=LAYERS,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.Percentile,
    )
    return {
        "torch": torch_run(module),
        "torch without oneDNN": torch_run(module, onednn=False),
        "torch, bfloat16": torch_run(module, bfloat16=True),
        "ONNX Runtime": onnx_run(plain, threads),
        "ONNX Runtime, int8 dynamic": onnx_run(dynamic, threads),
        "ONNX Runtime, int8 static": onnx_run(static, threads),
    }


class Logits(nn.Module):
    """The probabilities of a classifier, without how typical an image is of its classes."""

    def __init__(self, classifier: ContinualClassifier) -> None:
        super().__init__()
        self.predictor, self.method = classifier.predictor, classifier.predictor.method

    def forward(self, images: Tensor) -> Tensor:
        return self.predictor.calibrated(self.method.logits(images))


# -- measurements


def interleaved(
    runs: dict[str, Run], images: Tensor, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median wall-clock and CPU seconds of variants measured alternately."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # one to warm up
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run(images)
            if number:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (statistics.median(w for w, _ in each), statistics.median(c for _, c in each))
        for name, each in times.items()
    }


def rows_of(
    backbone: str,
    runs: dict[str, Run],
    images: Tensor,
    rounds: int,
    quality: dict[str, dict[str, float]],
) -> list[dict[str, Any]]:
    """Return a row for each variant and batch size, with the `quality` of the variant."""
    rows = []
    for size in BATCHES:
        batch = images[:size].contiguous()
        times = interleaved(runs, batch, rounds if size == 1 else max(3, rounds // 5))
        wall, cpu = times["torch"]
        for name, (seconds, cpu_seconds) in times.items():
            row: dict[str, Any] = {
                "backbone": backbone,
                "batch": size,
                "variant": name,
                "ms": 1000 * seconds,
                "CPU ms": 1000 * cpu_seconds,
                "times faster": wall / seconds,
                "times less CPU": cpu / cpu_seconds,
                **quality.get(name, {}),
            }
            rows.append(row)
    return rows


def photo(options: argparse.Namespace) -> list[dict[str, Any]]:
    """`photo` with the classifier of `coda learn`, taught CIFAR-100."""
    per_class, tested = (2, 40) if options.quick else (20, options.images)
    names = ("train", "train-labels", "test", "test-labels")
    train, labels, test, test_labels = (
        np.load(options.data / f"cifar-{name}.npy", mmap_mode="r") for name in names
    )
    order = np.argsort(labels, kind="stable").reshape(100, -1)  # class by class
    taught, held_out = order[:, :per_class].ravel(), order[:, -2:].ravel()[:CALIBRATION_IMAGES]
    classifier = ContinualClassifier("photo", device="cpu", verbose=False)
    classifier.learn(list(train[taught]), [f"{label:02}" for label in labels[taught]], validation=0)
    chosen = np.random.RandomState(0).permutation(len(test))[:tested]
    module = Logits(classifier).eval()

    def views(images: Array) -> Tensor:
        preprocessing = classifier.predictor.preprocessing
        pixels = [eval_view(as_image(image), preprocessing, "crop") for image in images]
        return torch.from_numpy(np.stack(pixels))

    with tempfile.TemporaryDirectory() as folder:
        runs = variants(module, views(train[held_out]), Path(folder), options.threads)
        best: dict[str, list[Tensor]] = {name: [] for name in runs}
        for first in range(0, tested, 100):
            images = views(test[chosen[first : first + 100]])
            for name, run in runs.items():
                best[name].append(run(images).argmax(dim=1))
        quality = qualities(
            {name: torch.cat(parts) for name, parts in best.items()},
            torch.from_numpy(test_labels[chosen]),
        )
        images = views(test[: max(BATCHES)])
        return rows_of("photo, 112 px", runs, images, options.rounds, quality)


def qualities(best: dict[str, Tensor], labels: Tensor) -> dict[str, dict[str, float]]:
    """Return the accuracy of each variant, and how its answers differ from those of the first."""
    base = next(iter(best.values()))
    table = {}
    for name, rows in best.items():
        gained = 100 * ((rows == labels).double() - (base == labels).double())
        table[name] = {
            "accuracy %": float(100 * (rows == labels).double().mean()),
            "difference": float(gained.mean()),
            "± (95 %)": float(1.96 * gained.std() / len(gained) ** 0.5),
            "same label %": float(100 * (rows == base).double().mean()),
        }
    return table


def base(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The features of ViT-B/16 with random weights: time only."""
    small = ViTConfig(width=64, heads=4, mlp_width=128, depth=2, image_size=32)
    vit = ViT(small if options.quick else ViTConfig()).initialise(torch.Generator().manual_seed(0))
    vit.requires_grad_(False).eval()
    size = vit.config.image_size
    images = torch.randn(max(BATCHES), 3, size, size, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        runs = variants(vit, images[:16], Path(folder), options.threads)
        return rows_of("ViT-B/16", runs, images, max(3, options.rounds // 3), {})


def cold(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A new process that classifies one image with `photo`, against one that imports torch."""
    compileall.compile_dir(Path(coda_prompt.__file__).parent, quiet=1)  # as in an installed package
    with tempfile.TemporaryDirectory() as folder:
        classifier = ContinualClassifier("photo", device="cpu", verbose=False)
        images = np.random.RandomState(0).randint(0, 256, (20, 64, 64, 3), np.uint8)
        classifier.learn(list(images), ["a", "b"] * 10, validation=0)
        classifier.save(f"{folder}/model")
        as_image(images[0]).save(f"{folder}/image.png")
        predict = ("coda_prompt", "predict", f"{folder}/model", f"{folder}/image.png")
        commands = {
            "import torch": ["-c", "import torch"],
            "coda predict": ["-m", *predict, "--device", "cpu"],
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for number in range(options.rounds // 3 + 1):
            for name, command in commands.items():
                cpu, wall = _child_seconds(), time.perf_counter()
                subprocess.run([sys.executable, *command], check=True, capture_output=True)
                if number:
                    times[name].append((_child_seconds() - cpu, time.perf_counter() - wall))
    rows = []
    for name, each in times.items():
        cpu, wall = (statistics.median(seconds) for seconds in zip(*each, strict=True))
        rows.append({"command": name, "CPU s": cpu, "s": wall})
    torch_row = rows[0]
    for row in rows:
        row["times import torch, CPU"] = row["CPU s"] / torch_row["CPU s"]
        row["times import torch, clock"] = row["s"] / torch_row["s"]
    return rows


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


PARTS = {"photo": photo, "base": base, "cold": cold}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("/opt/data"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--images", type=int, default=2000, help="test images")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/inference.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"machine": machine()}
    if options.out.exists():  # keep parts that are not measured now
        results = {**json.loads(options.out.read_text("utf-8")), **results}
    for part in options.only.split(","):
        results[part] = PARTS[part](options)
        show(results[part], part)
        write_atomically(options.out, json.dumps(results, indent=1).encode())


if __name__ == "__main__":
    main()
