"""Measure other ideas to make a training step faster against the step as it is.

    python benchmarks/tried.py [--backbone ViT-S/16] [--out FILE]

A step with exact queries and batch 16; variants are measured alternately. Quantised and
half-precision variants change the numbers: the cosine between their and the exact queries is
printed next to the time.

A second table has the queries of new views that a ridge regression predicts from the tokens after
a few blocks. It is fitted on one view of each training image of a task of pocket.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import VITS, batch_for, in_task, interleaved, machine, product_step, show
from torch import Tensor, nn
from torch.nn import functional as F

from coda_prompt.research.lessons import DRAWING_AUGMENTATION
from coda_prompt.research.methods import TrainingBatch
from coda_prompt.research.methods.coda import CodaPrompt
from coda_prompt.research.streams.pocket import pocket_source
from coda_prompt.research.streams.stream import Samples
from coda_prompt.research.training.loading import Epoch, Views, batches
from coda_prompt.research.vit.catalog import load_backbone
from coda_prompt.research.vit.linear import Linear
from coda_prompt.storage.files import write_atomically

Step = Callable[[], object]


def variants(name: str, size: int) -> dict[str, tuple[Step, Tensor]]:
    """Return the step of each variant and the queries it uses."""
    method = in_task(name, 5, 50, 10)
    images, labels = batch_for(name, size, method)
    results = {
        "as it is": (product_step(method, images, labels, cached=False), method.queries(images))
    }

    recomputing = copy.deepcopy(method)
    recomputing.backbone.recompute = True
    step = product_step(recomputing, images, labels, cached=False)
    results["activations computed again"] = (step, method.queries(images))

    last = copy.deepcopy(method)
    stem: nn.Module = last.backbone.patch_embed
    stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stored = images.to(memory_format=torch.channels_last)
    step = product_step(last, stored, labels, cached=False)
    results["channels-last stem"] = (step, last.queries(stored))

    half = product_step(method, images, labels, cached=False)

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            half()

    with torch.autocast("cpu", torch.bfloat16):
        results["bfloat16 autocast"] = (autocast, method.queries(images).float())

    plain = product_step(method, images, labels, cached=False)

    def blas() -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            plain()

    results["products through BLAS"] = (blas, method.queries(images))

    quantised = _quantised(method)
    if quantised is not None:
        results["query pass in int8"] = _with_queries_of(quantised, method, images, labels)
    compiled = copy.deepcopy(method)
    for block in compiled.backbone.blocks:
        block.compile()
    step = product_step(compiled, images, labels, cached=False)
    results["torch.compile of the blocks"] = (step, compiled.queries(images))
    return results


class EightBit(nn.Module):
    """A frozen linear layer with 8-bit weights and dynamically quantised inputs."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        plain = nn.Linear(layer.in_features, layer.out_features)
        plain.load_state_dict(layer.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantised = torch.ao.quantization.quantize_dynamic(
                nn.Sequential(plain), {nn.Linear}, dtype=torch.qint8
            )
        self.layer: nn.Module = quantised[0]

    def forward(self, inputs: Tensor, rows: slice | None = None, *, gelu: bool = False) -> Tensor:
        outputs = self.layer(inputs)[..., slice(None) if rows is None else rows]
        return nn.functional.gelu(outputs) if gelu else outputs


def _quantised(method: CodaPrompt) -> nn.Module | None:
    """Return the frozen ViT with 8-bit linear layers, or None if torch does not support them."""
    network = copy.deepcopy(method.backbone)
    try:
        for module in list(network.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, Linear):
                    setattr(module, name, EightBit(layer))
    except (AttributeError, RuntimeError):
        return None
    return network


def _with_queries_of(
    quantised: nn.Module, method: CodaPrompt, images: Tensor, labels: Tensor
) -> tuple[Step, Tensor]:
    """Use 8-bit queries, except in the last block: it slices weights, which 8-bit layers cannot."""
    blocks: Any = quantised.blocks
    blocks[-1] = method.backbone.blocks[-1]

    def step() -> None:
        method.zero_grad(set_to_none=True)
        with torch.no_grad():
            queries = quantised(images)
        loss = method.loss(TrainingBatch(images, labels, queries))
        (loss.mean.mean() + loss.penalty).backward()

    with torch.no_grad():
        return step, quantised(images)


@torch.no_grad()
def predicted_queries() -> list[dict[str, Any]]:
    """Compare predicted queries of new views, and those of plain images, with the exact ones."""
    backbone, source = load_backbone("pocket"), pocket_source()
    labels = np.asarray(source.train.labels)
    positions = np.flatnonzero(labels < 20)  # the first task
    samples = Samples(source.train, positions, labels[positions])
    views = Views(backbone.preprocessing, DRAWING_AUGMENTATION, "squash")

    def images(epoch: int | None) -> Tensor:
        order = [list(range(len(positions)))]
        seeded = None if epoch is None else Epoch(0, 0, epoch)
        return next(iter(batches(samples, views, order, epoch=seeded))).images

    vit = backbone.vit
    fitted, new = images(0), images(1)
    targets, exact = vit.features(fitted).double(), vit.features(new).double()

    def row(queries: str, found: Tensor, blocks: float) -> dict[str, Any]:
        mean, direction = targets.mean(dim=0), F.cosine_similarity
        return {
            "queries": queries,
            "share of a pass": blocks / vit.config.depth,
            "cosine": float(direction(found, exact).mean()),
            "cosine of differences to the mean": float(
                direction(found - mean, exact - mean).mean()
            ),
        }

    rows = [row("of the plain image", vit.features(images(None)).double(), 0)]
    for blocks in range(1, 5):
        known, inputs = (
            _summary(vit.run(vit.embed(each), range(blocks))) for each in (fitted, new)
        )
        ridge = 0.01 * known.square().mean() * torch.eye(known.shape[1])
        weights = torch.linalg.solve(known.T @ known + ridge, known.T @ targets)
        rows.append(row(f"predicted after block {blocks}", inputs @ weights, blocks))
    return rows


def _summary(tokens: Tensor) -> Tensor:
    """Return the class token, the mean of the others and 1, B x (2 D + 1) in float64."""
    ones = torch.ones(len(tokens), 1)
    return torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1), ones], dim=1).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backbone", default="ViT-S/16", choices=list(VITS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/tried.json"))
    options = parser.parse_args()
    results = variants(options.backbone, options.batch)
    seconds = interleaved({name: step for name, (step, _) in results.items()}, 5)
    exact = results["as it is"][1]
    rows = [
        {
            "variant": name,
            "seconds": seconds[name],
            "times faster": seconds["as it is"] / seconds[name],
            "cosine of its queries": float(nn.functional.cosine_similarity(queries, exact).mean()),
        }
        for name, (_, queries) in results.items()
    ]
    show(rows, f"{options.backbone}, batch {options.batch}")
    predicted = predicted_queries()
    show(predicted, "Queries of new views, pocket")
    content = {"machine": machine(), "backbone": options.backbone, "rows": rows}
    content["predicted queries"] = predicted
    write_atomically(options.out, json.dumps(content, indent=1).encode())


if __name__ == "__main__":
    main()
