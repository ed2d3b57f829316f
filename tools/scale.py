"""Estimate the cost of streams on machines we do not have: the tables of docs/lab/scaling.md.

    python tools/scale.py            the tables
    python tools/scale.py --check    predicted and measured on this machine, point by point

Operations and bytes follow from the shapes. Two properties of the machine, multiply-adds per second
and memory bandwidth, are fitted to two measured steps (benchmarks/speed.json); all other measured
points are predicted with them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parents[1] / "benchmarks"
PROMPTED = 5
"""Blocks with prompts."""
PREFIX = 4
"""Tokens in front of the keys, and as many in front of the values: prompts of length 8."""


@dataclass(frozen=True)
class Net:
    """Shapes of a ViT, and the operations and bytes that follow from them."""

    name: str
    tokens: int
    width: int
    depth: int
    hidden: int
    stem: float
    """Multiply-adds before the first block."""

    @property
    def parameters(self) -> float:
        return self.depth * (4 * self.width**2 + 2 * self.width * self.hidden)

    def block(self, *, prefix: int = 0) -> float:
        """Count the multiply-adds of one block for one image."""
        linear = self.tokens * (4 * self.width**2 + 2 * self.width * self.hidden)
        return linear + 2 * self.tokens * (self.tokens + prefix) * self.width

    @property
    def last_block(self) -> float:
        """Multiply-adds of the last block: only the class token attends to all tokens."""
        keys_and_values = 2 * self.tokens * self.width**2
        own = 2 * self.width**2 + 2 * self.width * self.hidden + 2 * self.tokens * self.width
        return keys_and_values + own

    @property
    def forward(self) -> float:
        return self.stem + (self.depth - 1) * self.block() + self.last_block

    @property
    def prompted(self) -> float:
        return self.forward + PROMPTED * 2 * self.tokens * PREFIX * self.width

    @property
    def shared(self) -> float:
        """Multiply-adds that query and prompted pass share: up to the first projections."""
        return self.stem + 3 * self.tokens * self.width**2

    @property
    def backward(self) -> float:
        """Multiply-adds of activation gradients; the first block's projections need none."""
        attention = 2 * self.tokens * (self.tokens + PREFIX) * self.width
        linear = self.tokens * (4 * self.width**2 + 2 * self.width * self.hidden)
        inner = (self.depth - 1) * (linear + 2.5 * attention)
        return inner - 3 * self.tokens * self.width**2 + self.last_block

    @property
    def moved(self) -> float:
        """Bytes of activations read and written in a forward pass, besides matrix products."""
        return 4.0 * self.depth * self.tokens * (12 * self.width + 3 * self.hidden)

    @property
    def saved(self) -> float:
        """Bytes of activations saved for the backward pass, for one image."""
        return 4.0 * self.depth * self.tokens * (9 * self.width + 1.25 * self.hidden)

    def prompt_sum(self, components: float) -> float:
        """Count the multiply-adds of weighting and summing components, for one image."""
        return PROMPTED * components * (2 + 2 * PREFIX) * self.width

    def component_bytes(self, components: float) -> float:
        """Bytes of key, attention vector and prompt of each, and the two precomputed products."""
        return 4.0 * PROMPTED * components * (4 + 2 * PREFIX) * self.width


def patches(side: int, width: int, channels: int = 3) -> float:
    return (224 // side) ** 2 * side**2 * channels * width


NETS = {
    net.name: net
    for net in (
        Net("ViT-S/16", 197, 384, 12, 1536, patches(16, 384)),
        Net("ViT-B/16", 197, 768, 12, 3072, patches(16, 768)),
        Net("ViT-L/16", 197, 1024, 24, 4096, patches(16, 1024)),
        Net("ViT-g/14", 257, 1408, 40, 6144, patches(14, 1408)),
    )
}


def pocket() -> Net:
    """Return the shapes of the package's backbone; its stem is two convolutions."""
    from coda_prompt.research.vit.catalog import load_backbone

    config = load_backbone("pocket").vit.config
    channels, side, stem = (config.channels, *config.stem, config.width), config.image_size, 0.0
    for before, after in pairwise(channels):
        side //= 2
        stem += side**2 * 9 * before * after
    return Net("pocket", config.grid**2 + 1, config.width, config.depth, config.mlp_width, stem)


# -- a machine


@dataclass(frozen=True)
class Machine:
    """Speed of a device and its links."""

    rate: float
    """Multiply-adds per second of one device."""
    bandwidth: float
    """Bytes per second between a device and its memory."""
    link: float = 1e12
    """Bytes per second between devices."""
    latency: float = 0.0
    """Seconds per message between devices."""

    def seconds(self, multiply_adds: float, moved: float) -> float:
        return multiply_adds / self.rate + moved / self.bandwidth

    def step(
        self, net: Net, images: float, *, cached: bool, components: float = 100, devices: int = 1
    ) -> float:
        """Estimate the seconds of a training step of `images` images over all devices."""
        per_image = net.prompted + net.backward + net.prompt_sum(components)
        moved = 3 * net.moved
        if not cached:
            per_image += net.forward - net.shared
            moved += net.moved
        share = images / devices
        prompts = net.component_bytes(components)
        return self.seconds(share * per_image, share * moved + prompts) + self.exchange(
            net, devices
        )

    def exchange(self, net: Net, devices: int, classes: int = 10, per_task: int = 10) -> float:
        """Estimate the seconds of an all-reduce of the gradients around a ring."""
        if devices == 1:
            return 0.0
        trained = 4.0 * (per_task * PROMPTED * (2 + 2 * PREFIX) + classes) * net.width
        return 2 * trained / self.link + 2 * (devices - 1) * self.latency

    def evaluation(self, net: Net, images: float, queries: float) -> float:
        """Estimate the seconds of prompted passes of `images` images and of `queries` queries."""
        operations = images * net.prompted + queries * (net.forward - net.shared)
        return self.seconds(operations, (images + queries) * net.moved)


def fit_machine(rows: list[dict[str, Any]]) -> Machine:
    """Fit rate and bandwidth to the cached steps of the largest and the smallest network."""
    (a, b, s), (c, d, t) = (
        (
            row["batch"] * (net.prompted + net.backward + net.prompt_sum(50)),
            row["batch"] * 3 * net.moved,
            row["seconds"],
        )
        for net, row in ((NETS["ViT-B/16"], _row(rows, "ViT-B/16")),
                         (pocket(), _row(rows, "pocket")))
    )  # fmt: skip
    determinant = a * d - b * c
    return Machine(determinant / (s * d - b * t), determinant / (a * t - s * c))


def _row(rows: list[dict[str, Any]], backbone: str) -> dict[str, Any]:
    steps = (row for row in rows if row["step"] == "cached, whole batch")
    return next(row for row in steps if row["backbone"] == backbone)


def points(measured: dict[str, Any]) -> Iterable[tuple[str, float, float]]:
    """Yield name, predicted and measured value of every point that was not fitted (s or MiB)."""
    machine, nets = fit_machine(measured["training"]), {**NETS, "pocket": pocket()}
    steps = [
        row
        for row in measured["training"]
        if row["backbone"] in nets and row["step"].endswith(", whole batch")
    ]
    for row in steps:
        kind = row["step"].partition(",")[0]
        cached = kind == "cached"
        if cached and row["backbone"] in ("ViT-B/16", "pocket"):
            continue
        predicted = machine.step(nets[row["backbone"]], row["batch"], cached=cached, components=50)
        yield f"step, {row['backbone']}, {kind} queries", predicted, row["seconds"]
    for row in steps:
        if row["step"].startswith("cached") and row["backbone"] != "ViT-B/16":
            predicted = row["batch"] * nets[row["backbone"]].saved / 2**20
            yield f"MiB of a step, {row['backbone']}", predicted, row["MiB"]
    for row in measured["evaluation"]:
        size = row["images a task"]
        predicted = machine.evaluation(nets[row["backbone"]], 55 * size, 10 * size)
        yield f"evaluation of 10 tasks, {row['backbone']}", predicted, row["product"]
    for row in measured["growth"]:
        predicted = machine.step(
            nets[row["backbone"]], 16, cached=True, components=row["components"]
        )
        yield f"step, {row['backbone']}, {row['components']} components", predicted, row["seconds"]


# -- tables

GPU = Machine(rate=60e12 / 2, bandwidth=1.5e12, link=25e9, latency=10e-6)
"""Assumed: sustains 60 TFLOP/s and 1.5 TB/s; 25 GB/s and 10 us between devices."""


def table(heads: list[str], rows: Iterable[list[str]]) -> None:
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def hours(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 100 * 86400 else f"{seconds / 86400:,.0f} days"


def size(bytes_: float) -> str:
    for unit in ("kB", "MB", "GB"):
        bytes_ /= 1000
        if bytes_ < 1000:
            return f"{bytes_:,.3g} {unit}"
    return f"{bytes_ / 1000:,.3g} TB"


LARGE_NETS = [NETS[name] for name in ("ViT-B/16", "ViT-L/16", "ViT-g/14")]


def tables() -> None:
    """Print all tables of the docs."""
    print_training()
    print_learned_state()
    print_evaluation()
    print_memory_and_traffic()


def print_training() -> None:
    """Print training speed and time by number of devices."""
    print("Images a second in training (exact queries, 100 components), and share of the ideal\n")
    for batch in (128, 8192):
        print(f"Global batch {batch}:\n")
        rows = []
        for net in LARGE_NETS:
            one = GPU.step(net, min(batch, 128), cached=False) / min(batch, 128)
            cells = []
            for devices in (1, 8, 64, 1024):
                if devices > batch:
                    cells.append("-")
                    continue
                rate = batch / GPU.step(net, batch, cached=False, devices=devices)
                cells.append(f"{rate:,.0f} ({100 * rate * one / devices:.0f} %)")
            rows.append([net.name, *cells])
        table(["backbone", "1 GPU", "8", "64", "1,024"], rows)
    print("Training a stream: 20 epochs of all images, global batch 8192\n")
    table(
        ["backbone", "images", "1 GPU", "8", "64", "1,024"],
        [
            [net.name, f"{images:,.0f}", *(
                hours(20 * images / 8192 * GPU.step(net, 8192, cached=False, devices=devices))
                for devices in (1, 8, 64, 1024)
            )]
            for net in LARGE_NETS for images in (1e6, 1e8, 1e9)
        ],
    )  # fmt: skip


def print_learned_state() -> None:
    """Print size and cost of components and classifier by number of tasks and classes."""
    print("What is learned: 10 components a task, ViT-B/16\n")
    net = NETS["ViT-B/16"]
    table(
        ["tasks", "components", "their size", "their sum, of a pass", "files of a checkpoint"],
        [
            [f"{tasks:,}", f"{10 * tasks:,}", size(net.component_bytes(10 * tasks)),
             f"{100 * net.prompt_sum(10 * tasks) / net.forward:.1f} %", f"{tasks:,}"]
            for tasks in (10, 100, 1000, 10_000)
        ],
    )  # fmt: skip
    print("The head\n")
    table(
        ["classes", "size, ViT-B/16", "of a pass", "size, ViT-g/14", "of a pass"],
        [
            [f"{classes:,}", *(
                cell
                for own in (NETS["ViT-B/16"], NETS["ViT-g/14"])
                for cell in (size(4 * classes * own.width),
                             f"{100 * classes * own.width / own.forward:.2f} %")
            )]
            for classes in (100, 10_000, 1_000_000)
        ],
    )  # fmt: skip


def print_evaluation() -> None:
    """Print the time to measure the accuracy matrix."""
    net = NETS["ViT-B/16"]
    print("All rows of the accuracy matrix, ViT-B/16, one GPU, 50 test images a class, "
          "10 classes a task\n")  # fmt: skip
    table(
        ["tasks", "test images", "passes", "time", "of ten rows (`measure_every`)",
         "training of 1,000 images a class, 20 epochs"],
        [
            [f"{tasks:,}", f"{500 * tasks:,}", f"{250 * tasks * (tasks + 1):,}",
             hours(GPU.evaluation(net, 250 * tasks * (tasks + 1), 500 * tasks)),
             hours(GPU.evaluation(net, 2750 * tasks, 500 * tasks)),
             hours(20 * 10_000 * tasks / 128 * GPU.step(net, 128, cached=False))]
            for tasks in (10, 100, 1000, 10_000)
        ],
    )  # fmt: skip


def print_memory_and_traffic() -> None:
    """Print memory of a device, sizes of caches and bytes sent in a step."""
    print("Memory of a device, batch of 128 images on it, float32\n")
    table(
        ["backbone", "weights", "activations", "with recompute"],
        [
            [own.name, size(4 * own.parameters), size(128 * own.saved),
             size(128 * 4 * own.tokens * own.width * (own.depth + 12))]
            for own in LARGE_NETS
        ],
    )  # fmt: skip
    print("Queries kept in half precision\n")
    table(
        ["images", "queries, ViT-B/16", "queries, ViT-g/14"],
        [
            [f"{images:,.0f}", size(images * 2 * 768), size(images * 2 * 1408)]
            for images in (1e6, 1e8, 1e9)
        ],
    )  # fmt: skip
    print("Sent by each device in a step (ring), 10 components and 10 classes a task: "
          + ", ".join(f"{net.name} {size(2 * 4 * (100 * PROMPTED + 10) * net.width)}"
                      for net in LARGE_NETS))  # fmt: skip


def check() -> None:
    measured = json.loads((MEASURED / "speed.json").read_text("utf-8"))
    machine = fit_machine(measured["training"])
    print(
        f"fitted: {2 * machine.rate / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s of "
        "activations\n"
    )
    table(
        ["point", "predicted", "measured", "off by"],
        [
            [name, f"{predicted:.3g}", f"{actual:.3g}", f"{100 * (predicted / actual - 1):+.0f} %"]
            for name, predicted, actual in points(measured)
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check() if parser.parse_args().check else tables()


if __name__ == "__main__":
    main()
