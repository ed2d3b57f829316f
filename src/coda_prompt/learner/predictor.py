"""The only inference path: preprocess, batch, logits, probabilities, unknown rule, top-k."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from coda_prompt.data.images import eval_view, required_min_side
from coda_prompt.data.inputs import as_image
from coda_prompt.data.sources import Split
from coda_prompt.errors import BadImage, BadImages, Interrupted
from coda_prompt.methods import Method
from coda_prompt.preprocessing import Preprocessing
from coda_prompt.training.settings import Event

OnEvent = Callable[[Event], object]

BATCH_SIZE = 64
"""Images that are decoded and classified together; memory does not grow with their number."""


@dataclass(frozen=True)
class Candidate:
    """A class and its probability."""

    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The classification of one image.

    Printed as JSON, here and over HTTP: `{"label": null, "unknown": true, "best": "cat",
    "probability": 0.31, "top": [{"label": "cat", "probability": 0.31}, ...]}`.
    """

    label: str | None
    """The most likely class; None if its probability is below the threshold for unknown."""
    unknown: bool
    """Whether the probability of `best` is below the threshold."""
    best: str
    """The most likely class, unknown or not."""
    probability: float
    """Of `best`."""
    top: tuple[Candidate, ...]
    """The most likely classes, in descending order of probability."""

    def as_dict(self) -> dict[str, Any]:
        """Return the prediction as plain JSON types."""
        return {**asdict(self), "top": [asdict(candidate) for candidate in self.top]}


@dataclass
class Predictor:
    """Classifies images with a trained method.

    The command line, `ContinualClassifier`, the HTTP service and the ONNX export share it.
    """

    method: Method
    preprocessing: Preprocessing
    """The pixels the backbone expects."""
    resize: Literal["crop", "squash"]
    """How an image becomes square: `crop` its center or `squash` it."""
    classes: list[str]
    """Class names in the order of the method's logits."""
    temperature: float
    """Divides the logits before they become probabilities."""
    fabric: Fabric
    """Device and precision. With several processes, all of them must make the same calls: each
    computes its share of a batch, and all receive every result."""

    def view(self, decode: Callable[[int], Image.Image]) -> Tensor:
        """Return an image as the backbone expects it, C x H x W.

        Args:
            decode: Given the shorter side in pixels that suffices, returns the image: a larger
                JPEG file can be decoded at reduced size.
        """
        image = decode(required_min_side(self.preprocessing, None))
        return eval_view(image, self.preprocessing, self.resize)

    def logits(self, images: Sequence[Tensor]) -> Tensor:
        """Return the logits of preprocessed images, B x classes in float64 on the CPU."""
        fabric, method = self.fabric, self.method
        own = slice(fabric.global_rank, None, fabric.world_size)
        # A process without a share joins in with an empty batch: sharded weights need everyone.
        size = self.preprocessing.size
        empty = torch.zeros(0, self.preprocessing.channels, size, size)
        batch = torch.stack(list(images[own])) if images[own] else empty
        dtype = next(method.backbone.parameters()).dtype
        with torch.inference_mode(), fabric.autocast():
            logits = method.logits(batch.to(fabric.device, dtype))
        if fabric.world_size > 1:
            table = logits.new_zeros(len(images), logits.shape[1])
            table[own] = logits
            reduced = fabric.all_reduce(table, reduce_op="sum")
            assert isinstance(reduced, Tensor)
            logits = reduced
        return logits.double().cpu()

    def probabilities(self, images: Sequence[Tensor]) -> Tensor:
        """Return the probabilities of preprocessed images, B x classes in float64 on the CPU."""
        return self.calibrated(self.logits(images))

    def calibrated(self, logits: Tensor) -> Tensor:
        """Return the probabilities for logits, B x classes."""
        return torch.softmax(logits / self.temperature, dim=1)

    def rank(self, probabilities: Tensor, top: int, unknown_below: float) -> Prediction:
        """Apply top-k and the unknown rule to one image's probabilities.

        Args:
            probabilities: One value for each class.
            top: Number of classes to name.
            unknown_below: The image is unknown if its most likely class is less likely than this.
        """
        values, rows = probabilities.topk(min(max(1, top), len(self.classes)))
        candidates = tuple(
            Candidate(self.classes[row], value)
            for row, value in zip(rows.tolist(), values.tolist(), strict=True)
        )
        best = candidates[0]
        unknown = best.probability < unknown_below
        label = None if unknown else best.label
        return Prediction(label, unknown, best.label, best.probability, candidates)

    def split_logits(
        self,
        split: Split,
        indices: Sequence[int],
        *,
        stop: Callable[[], bool] = lambda: False,
        on_event: OnEvent | None = None,
    ) -> Tensor:
        """Return the logits of images of a split, N x classes in float64 on the CPU.

        Args:
            split: Where the images are read from, a batch at a time.
            indices: Which images of the split.
            stop: Polled after each batch; once true, this raises Interrupted.
            on_event: Called with the progress after each batch.

        Raises:
            BadImages: Images of a batch that cannot be read.
            Interrupted: `stop` became true.
        """
        table = torch.zeros(len(indices), self.method.classes_seen, dtype=torch.float64)
        for positions, logits in self._batches(
            lambda position, side: split.image(int(indices[position]), side),
            len(indices),
            None,
            on_event,
        ):
            table[positions] = logits
            if stop():
                raise Interrupted
        return table

    def predict(
        self,
        images: list[Any] | NDArray[Any],
        *,
        top: int = 5,
        unknown_below: float = 0.0,
        on_bad: Callable[[BadImage], None] | None = None,
        on_event: OnEvent | None = None,
    ) -> Iterator[tuple[int, Prediction]]:
        """Classify images, a batch at a time.

        Args:
            images: Paths, PIL images, arrays or tensors.
            top: Number of classes to name.
            unknown_below: An image is unknown if its most likely class is less likely than this.
            on_bad: Called with each image that cannot be read, which is then skipped.
            on_event: Called with the progress after each batch.

        Yields:
            The index of an image and its prediction.

        Raises:
            BadImages: Images of a batch that cannot be read, if there is no `on_bad`.
        """
        for indices, logits in self._batches(
            lambda index, side: as_image(images[index], side), len(images), on_bad, on_event
        ):
            for index, row in zip(indices, self.calibrated(logits), strict=True):
                yield index, self.rank(row, top, unknown_below)

    def _batches(
        self,
        read: Callable[[int, int], Image.Image],
        count: int,
        on_bad: Callable[[BadImage], None] | None,
        on_event: OnEvent | None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Read images 0 to `count`; yield the indices and logits of a batch of readable ones."""
        for start in range(0, count, BATCH_SIZE):
            end = min(start + BATCH_SIZE, count)
            views, readable, bad = [], [], []
            for index in range(start, end):
                try:
                    views.append(self.view(partial(read, index)))
                    readable.append(index)
                except BadImage as problem:
                    bad.append(problem)
            for unreadable in bad:
                if on_bad is None:
                    raise BadImages(bad)
                on_bad(unreadable)
            if readable:
                yield readable, self.logits(views)
            if on_event is not None:
                on_event(Event("pass", 0, 0, step=end, steps=count))
