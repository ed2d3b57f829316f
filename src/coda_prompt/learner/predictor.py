"""From images to answers: preprocess, batch, logits, probabilities, unknown rule, top-k."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from coda_prompt.errors import BadImage, BadImages, BadOption, CorruptFile
from coda_prompt.images.inputs import as_image
from coda_prompt.images.preprocessing import Preprocessing, eval_view, required_min_side
from coda_prompt.images.sources import Split
from coda_prompt.learner.typicality import UnknownScorer
from coda_prompt.learner.unknown import (
    EVERYTHING_KNOWN,
    UnknownDetector,
    UnknownRule,
)
from coda_prompt.research.methods import Method
from coda_prompt.research.training.local import LocalDevice
from coda_prompt.research.training.settings import Event
from coda_prompt.research.vit.vit import Images

if TYPE_CHECKING:
    from lightning_fabric import Fabric

OnEvent = Callable[[Event], object]

BATCH_SIZE = 64
"""Images that are decoded and classified together; memory does not grow with their number."""


@dataclass(frozen=True)
class Candidate:
    """A class and its probability."""

    label: str
    """Class name."""
    probability: float
    """Its calibrated probability."""


@dataclass(frozen=True)
class Prediction:
    """The classification of one image.

    Printed as JSON, here and over HTTP: `{"label": null, "unknown": true, "best": "cat",
    "probability": 0.31, "typicality": 0.02, "top": [{"label": "cat", "probability": 0.31}, ...]}`.
    """

    label: str | None
    """The most likely class; None if the image is unknown."""
    unknown: bool
    """Whether the image is rejected: as not typical of the learned classes (`auto`), or because the
    probability of `best` is below a threshold."""
    best: str
    """The most likely class, unknown or not."""
    probability: float
    """Of `best`."""
    top: tuple[Candidate, ...]
    """The most likely classes, in descending order of probability."""
    typicality: float | None = None
    """Share of images of the learned classes that look no more typical of them than this image;
    None unless unknown images are asked for with `auto`."""

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
    fabric: Fabric | LocalDevice
    """Device and precision. With several processes, all of them must make the same calls: each
    computes its share of a batch, and all receive every result."""
    detector: UnknownDetector
    """Statistics to recognise unknown images."""

    def view(self, decode: Callable[[int], Image.Image]) -> Tensor:
        """Return an image as the backbone expects it, C x H x W.

        Args:
            decode: Given the shorter side in pixels that suffices, returns the image: a larger
                JPEG file can be decoded at reduced size.
        """
        image = decode(required_min_side(self.preprocessing))
        return torch.from_numpy(eval_view(image, self.preprocessing, self.resize))

    @cached_property
    def scorer(self) -> UnknownScorer:
        """Computes how typical images are of the learned classes."""
        return self.detector.scorer()

    def check(self, rule: UnknownRule) -> None:
        """Check that this model can apply a rule.

        Raises:
            BadOption: It was made with too few images.
        """
        if rule.rate is not None:
            self.scorer.check_rate(rule.rate)

    def logits(self, images: Sequence[Tensor], *, typicality: bool = False) -> Tensor:
        """Return the logits of preprocessed images, B x classes in float64 on the CPU.

        Args:
            images: C x H x W each.
            typicality: Append a column: how typical each image is of the learned classes.

        Raises:
            CorruptFile: The model has numbers that no lesson gives.
        """
        fabric, method = self.fabric, self.method
        own = slice(fabric.global_rank, None, fabric.world_size)
        # A process without a share joins in with an empty batch: sharded weights need everyone.
        size = self.preprocessing.size
        empty = torch.zeros(0, self.preprocessing.channels, size, size)
        batch = torch.stack(list(images[own])) if images[own] else empty
        dtype = next(method.backbone.parameters()).dtype
        with torch.inference_mode(), fabric.autocast():
            batch = batch.to(fabric.device, dtype)
            rows = torch.cat(self.outputs(batch), dim=1) if typicality else method.logits(batch)
        if fabric.world_size > 1:
            table = rows.new_zeros(len(images), rows.shape[1])
            table[own] = rows
            reduced = fabric.all_reduce(table, reduce_op="sum")
            assert isinstance(reduced, Tensor)
            rows = reduced
        rows = rows.double().cpu()
        if not rows.isfinite().all():
            raise CorruptFile("The model", "its scores of an image are not finite")
        if not typicality:
            return rows
        logits, tokens = rows.tensor_split([method.classes_seen], dim=1)
        return torch.cat([logits, self.scorer(tokens)[:, None]], dim=1)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logits of a batch and what the unknown scorer takes, in one pass.

        Returns:
            B x classes, and `ViT.plain_tokens`, B x 2 D.
        """
        method = self.method
        started: Images = images
        if method.first_block is not None:
            started = method.backbone.start(images, method.first_block)
        tokens = method.backbone.plain_tokens(started)
        class_tokens = tokens[:, : method.vit_config.width]
        queries = method.backbone.norm(class_tokens) if method.plain_queries else None
        return method.logits(started, queries), tokens

    def probabilities(self, images: Sequence[Tensor]) -> Tensor:
        """Return the probabilities of preprocessed images, B x classes in float64 on the CPU."""
        return self.calibrated(self.logits(images))

    def calibrated(self, logits: Tensor) -> Tensor:
        """Return the probabilities for logits, B x classes."""
        return torch.softmax(logits / self.temperature, dim=1)

    def rank(
        self, probabilities: Tensor, top: int, rule: UnknownRule, typicality: float | None = None
    ) -> Prediction:
        """Apply top-k and the unknown rule to one image's probabilities.

        Args:
            probabilities: One value for each class.
            top: Number of classes to name.
            rule: When the image is unknown.
            typicality: How typical the image is; needed if the rule has a rate.
        """
        values, rows = probabilities.topk(min(top, len(self.classes)))
        candidates = tuple(
            Candidate(self.classes[row], value)
            for row, value in zip(rows.tolist(), values.tolist(), strict=True)
        )
        best = candidates[0]
        unknown = rule.rejects(best.probability, typicality)
        label = None if unknown else best.label
        shown = None if rule.rate is None else typicality
        return Prediction(label, unknown, best.label, best.probability, candidates, shown)

    def split_logits(
        self,
        split: Split,
        *,
        typicality: bool = False,
        on_event: OnEvent | None = None,
    ) -> Tensor:
        """Return the logits of all images of a split, N x classes in float64 on the CPU.

        Args:
            split: Where the images are read from, a batch at a time.
            typicality: Append a column: how typical each image is of the learned classes.
            on_event: Called with the progress after each batch.

        Raises:
            BadImages: Images of a batch that cannot be read.
        """
        batches = self._batches(split.image, len(split), None, on_event)
        tables = [self.logits(views, typicality=typicality) for _, views in batches]
        columns = self.method.classes_seen + typicality
        return torch.cat(tables) if tables else torch.zeros(0, columns, dtype=torch.float64)

    def predict(
        self,
        images: list[Any] | NDArray[Any],
        *,
        top: int = 5,
        rule: UnknownRule = EVERYTHING_KNOWN,
        on_bad: Callable[[BadImage], None] | None = None,
        on_event: OnEvent | None = None,
    ) -> Iterator[tuple[int, Prediction]]:
        """Classify images, a batch at a time.

        Args:
            images: Paths, PIL images, arrays or tensors.
            top: Number of classes to name.
            rule: When an image is unknown.
            on_bad: Called with each image that cannot be read, which is then skipped.
            on_event: Called with the progress after each batch.

        Yields:
            The index of an image and its prediction.

        Raises:
            BadImages: Images of a batch that cannot be read, if there is no `on_bad`.
            BadOption: The model cannot apply the rule, or `top` is not positive.
        """
        if top < 1:
            raise BadOption("the prediction", "top", f"{top} is less than 1")
        self.check(rule)
        asked, classes = rule.rate is not None, len(self.classes)
        for indices, views in self._batches(
            lambda index, side: as_image(images[index], side), len(images), on_bad, on_event
        ):
            table = self.logits(views, typicality=asked)
            shares = table[:, classes].tolist() if asked else [None] * len(views)
            probabilities = self.calibrated(table[:, :classes])
            for index, row, share in zip(indices, probabilities, shares, strict=True):
                yield index, self.rank(row, top, rule, share)

    def _batches(
        self,
        read: Callable[[int, int], Image.Image],
        count: int,
        on_bad: Callable[[BadImage], None] | None,
        on_event: OnEvent | None,
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Read images 0 to `count`; yield the indices and views of a batch of readable ones."""
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
                yield readable, views
            if on_event is not None:
                on_event(Event("pass", 0, 0, step=end, steps=count))
