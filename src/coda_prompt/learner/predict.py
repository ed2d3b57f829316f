"""From images to answers: decode, encode, score, probabilities, unknown rule, top-k."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coda_prompt.encoder.threads import in_threads
from coda_prompt.errors import BadImage, BadImages, BadOption, NotLearned
from coda_prompt.images.labelled import Labelled, MemorySplit
from coda_prompt.learner.model import LearnedModel
from coda_prompt.learner.results import Progress
from coda_prompt.statistics.unknown import EVERYTHING_KNOWN, UnknownRule

OnProgress = Callable[[Progress], object]


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


@dataclass(frozen=True, eq=False)
class Answer:
    """The scores of one image."""

    scores: NDArray[np.float64]
    """One for each class."""
    probabilities: NDArray[np.float64]
    typicality: float | None
    """None unless it was asked for."""


def answer(model: LearnedModel, image: Image.Image, *, typicality: bool = False) -> Answer:
    """Classify one image: everything that predicts calls this.

    Args:
        model: What has been learned.
        image: The image, decoded with at least `encoder.min_side` pixels a side if it has them.
        typicality: Also compute how typical it is of the learned classes.

    Raises:
        CorruptFile: The model has numbers that no lesson gives.
    """
    encoded = model.encoder.encode(image, model.prompts)
    scores = model.scores(encoded.features[None])
    share = float(model.scorer.typicality(encoded.plain[None])[0]) if typicality else None
    return Answer(scores[0], model.probabilities(scores)[0], share)


def answers(
    model: LearnedModel,
    images: Labelled | Sequence[Any] | NDArray[Any],
    *,
    typicality: bool = False,
    on_bad: Callable[[BadImage], object] | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[int, Answer]]:
    """Classify images in a thread for each core; memory does not grow with their number.

    Args:
        model: What has been learned.
        images: Paths, PIL images, arrays or tensors, or labelled images.
        typicality: As in `answer`.
        on_bad: Called with each image that cannot be read, which is then skipped.
        on_progress: Called with the progress.

    Yields:
        The position of an image and its answer, in order.

    Raises:
        BadImages: Images that cannot be read, if there is no `on_bad`.
        NotLearned: No class has been learned yet.
    """
    if not model.tasks:
        raise NotLearned([], [])
    if not isinstance(images, Labelled):
        images = Labelled(MemorySplit(images, np.zeros(len(images), np.int64)), ("",))
    source, lock, count = images, threading.Lock(), len(images.split.labels)

    def one(index: int) -> Answer | BadImage:
        try:
            image = source.decode(index, model.encoder.min_side, lock)
        except BadImage as problem:
            return problem
        return answer(model, image, typicality=typicality)

    bad = []
    for index, result in enumerate(in_threads(one, range(count))):
        if isinstance(result, Answer):
            yield index, result
        elif on_bad is None:
            bad.append(result)
        else:
            on_bad(result)
        if on_progress is not None:
            on_progress(Progress("reading images", index + 1, count))
    if bad:
        raise BadImages(bad)


def predict(
    model: LearnedModel,
    images: Sequence[Any] | NDArray[Any],
    *,
    top: int = 5,
    rule: UnknownRule = EVERYTHING_KNOWN,
    on_bad: Callable[[BadImage], object] | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[int, Prediction]]:
    """Name the most likely classes of images; arguments and errors as in `answers`.

    Args:
        model: What has been learned.
        images: Paths, PIL images, arrays or tensors.
        top: Number of classes to name.
        rule: When an image is unknown.
        on_bad: As in `answers`.
        on_progress: As in `answers`.

    Raises:
        BadOption: The model cannot apply the rule, or `top` is not positive.
    """
    if top < 1:
        raise BadOption("the prediction", "top", f"{top} is less than 1")
    check_rule(model, rule)
    typicality = rule.rate is not None
    for index, each in answers(
        model, images, typicality=typicality, on_bad=on_bad, on_progress=on_progress
    ):
        yield index, ranked(model.classes, each, top, rule)


def check_rule(model: LearnedModel, rule: UnknownRule) -> None:
    """Check that a model can apply a rule.

    Raises:
        BadOption: It was made with too few images.
    """
    if rule.rate is not None and model.tasks:
        model.scorer.check_rate(rule.rate)


def ranked(classes: Sequence[str], answer: Answer, top: int, rule: UnknownRule) -> Prediction:
    """Apply top-k and the unknown rule to an answer."""
    order = np.argsort(-answer.probabilities, kind="stable")[:top].tolist()
    candidates = tuple(Candidate(classes[row], float(answer.probabilities[row])) for row in order)
    best = candidates[0]
    unknown = rule.rejects(best.probability, answer.typicality)
    label = None if unknown else best.label
    shown = None if rule.rate is None else answer.typicality
    return Prediction(label, unknown, best.label, best.probability, candidates, shown)
