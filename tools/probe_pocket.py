"""Evaluate the shipped backbone: ridge regression on frozen features of unseen classes.

    PYTHONPATH=src python tools/probe_pocket.py

It reads two assets of the package: `pocket-vit.safetensors` and the plain drawings of
`pocket-drawings.npz`, the first 80 of each class for training and the last 20 for testing. The
ridge penalty is chosen on the last 16 of the 80 training drawings. The baseline is the same
regression on raw pixels.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.vit import ViT

ASSETS = Path(__file__).resolve().parents[1] / "src" / "coda_prompt" / "assets"
DRAWINGS = 100
TRAIN_DRAWINGS = 80
FIT_DRAWINGS = 64
PENALTIES = tuple(10.0 ** (power / 2) for power in range(-10, 13))


class Ridge:
    """Ridge regression on one-hot targets with an unpenalised intercept, for any penalty."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        targets = torch.nn.functional.one_hot(labels).to(inputs)
        self.centre, self.prior = inputs.mean(0), targets.mean(0)
        centred = inputs - self.centre
        self.scales, self.axes = torch.linalg.eigh(centred.T @ centred)
        self.moments = self.axes.T @ (centred.T @ (targets - self.prior))

    def accuracy(self, inputs: Tensor, labels: Tensor, penalty: float) -> float:
        """Return top-1 accuracy in percent."""
        weights = self.axes @ (self.moments / (self.scales.clamp_min(0) + penalty)[:, None])
        predicted = ((inputs - self.centre) @ weights + self.prior).argmax(1)
        return 100 * (predicted == labels).double().mean().item()


def ridge_accuracy(features: Tensor, classes: int) -> tuple[float, float]:
    """Return top-1 accuracy on the test drawings in percent, and the chosen penalty.

    Args:
        features: Features of 100 drawings per class, ordered by class.
    """
    rows = features.double().unflatten(0, (classes, DRAWINGS))  # classes x drawings x D
    labels = torch.arange(classes)[:, None].expand(-1, DRAWINGS)

    def part(drawings: slice) -> tuple[Tensor, Tensor]:
        return rows[:, drawings].flatten(0, 1), labels[:, drawings].flatten()

    validation = part(slice(FIT_DRAWINGS, TRAIN_DRAWINGS))
    ridge = Ridge(*part(slice(FIT_DRAWINGS)))
    best = max(reversed(PENALTIES), key=lambda penalty: ridge.accuracy(*validation, penalty))
    test = part(slice(TRAIN_DRAWINGS, DRAWINGS))
    return Ridge(*part(slice(TRAIN_DRAWINGS))).accuracy(*test, best), best


def frozen_features(vit: ViT, pixels: Preprocessing, drawings: np.ndarray) -> Tensor:
    """Return final-norm class tokens of uint8 drawings, N x D."""
    mean, std = torch.tensor(pixels.mean), torch.tensor(pixels.std)
    images = torch.from_numpy(drawings)[:, None].float() / 255  # N x 1 x 28 x 28
    images = (images - mean[:, None, None]) / std[:, None, None]
    with torch.inference_mode():
        return torch.cat([vit.features(batch) for batch in images.split(500)])


def probe(weights: Path, archive: Path) -> dict[str, float]:
    """Compute the numbers of the model card."""
    with np.load(archive, allow_pickle=False) as arrays:
        drawings, classes = arrays["drawings"], len(arrays["classes"])
    backbone = load_backbone(str(weights))
    features = frozen_features(backbone.vit, backbone.preprocessing, drawings)
    accuracy, penalty = ridge_accuracy(features, classes)
    raw = torch.from_numpy(drawings).flatten(1) / 255
    raw_accuracy, raw_penalty = ridge_accuracy(raw, classes)
    return {
        "parameters": sum(parameter.numel() for parameter in backbone.vit.parameters()),
        "features_top1": accuracy,
        "features_penalty": penalty,
        "pixels_top1": raw_accuracy,
        "pixels_penalty": raw_penalty,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Probe the pocket backbone on unseen classes.")
    parser.add_argument("--weights", type=Path, default=ASSETS / "pocket-vit.safetensors")
    parser.add_argument("--drawings", type=Path, default=ASSETS / "pocket-drawings.npz")
    options = parser.parse_args()
    for name, value in probe(options.weights, options.drawings).items():
        print(f"{name:18} {value:.6g}")


if __name__ == "__main__":
    main()
