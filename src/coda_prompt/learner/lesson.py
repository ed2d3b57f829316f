"""One lesson, from images to what the model is afterwards and what there is to tell about it."""

from __future__ import annotations

import datetime
import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.encoder.encoder import EncodedImage, Encoder, Prompts
from coda_prompt.encoder.threads import in_threads
from coda_prompt.errors import BadImage, BadImages, BadOption, Interrupted, MissingExtra
from coda_prompt.images.kinds import is_drawing
from coda_prompt.images.labelled import Labelled, Sample
from coda_prompt.images.reading import FULL_SIZE
from coda_prompt.learner import findings
from coda_prompt.learner.evaluation import accuracy_by_class, among_all_and_own
from coda_prompt.learner.hashes import Hashes, image_hash
from coda_prompt.learner.model import PROMPTED, LearnedModel, LinearHead
from coda_prompt.learner.records import TaskRecord, WatchedAccuracy
from coda_prompt.learner.results import ClassAccuracy, Learned, Progress
from coda_prompt.seeding import keyed_generator
from coda_prompt.statistics import calibration
from coda_prompt.statistics.classifier import Classifier
from coda_prompt.statistics.unknown import DEFAULT_RATE

MIN_IMAGES_TO_HOLD_OUT, MIN_IMAGES_TO_TRAIN = 5, 2
MAX_SAMPLES = 40
"""Images of a lesson whose size and kind are examined."""

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class LessonOptions:
    """How one lesson is learned."""

    validation: float = 0.2
    """Share of each class that is held out until accuracy and calibration have been measured."""
    skip_bad: bool = False
    """Leave out images that cannot be read instead of failing."""
    find_duplicates: bool | None = None
    """Compare the images with those of earlier lessons; None: if these did."""
    training: dict[str, Any] = field(default_factory=dict)
    """Options of the training of prompts."""
    progress: Path | None = None
    """Folder for checkpoints of the training of prompts."""
    stop: Callable[[], bool] = lambda: False
    """Polled after each image and each step; once true, the lesson ends."""
    on_progress: Callable[[Progress], object] = lambda progress: None


@dataclass(frozen=True, eq=False)
class Read:
    """What is kept of the images of a lesson: each was decoded and passed through the encoder."""

    positions: Rows
    """The images that could be read."""
    features: NDArray[np.float32]
    """N x D."""
    plain: NDArray[np.float32]
    """The same without prompts, which the unknown score reads."""
    samples: list[Sample]
    """Size and kind of some of the images."""
    hashes: Hashes
    """N x BYTES; N x 0 without `hashing`."""
    bad: tuple[BadImage, ...] = ()


@dataclass(frozen=True, eq=False)
class Taught:
    """The images of a lesson, with rows for the classes of the model and new ones after them."""

    images: Labelled
    """Those that could be read."""
    read: Read
    names: list[str]
    """All class names by row."""
    rows: Rows
    """The class of each image."""
    held_out: NDArray[np.bool_]
    """Images that measure the lesson before they are learned too."""


def teach(
    model: LearnedModel, images: Labelled, options: LessonOptions, checked: Labelled | None = None
) -> tuple[LearnedModel, Learned]:
    """Learn images: new classes, and more images of known ones.

    Args:
        model: What has been learned before.
        images: The images with their classes.
        options: How they are learned.
        checked: Images of known classes, which are evaluated before and after.

    Returns:
        What has been learned now, and the outcome of the lesson.

    Raises:
        BadImages: Images that cannot be read, without `skip_bad`.
        Interrupted: `stop` became true.
    """
    started = time.perf_counter()
    taught = read_lesson(model, images, options)
    before = known_scores(model, checked, options)
    warnings = findings.image_findings(model, taught.images, taught.read.samples, checked)
    hints = lesson_hints(model, taught)
    prompted, taught = train_prompts(model, taught, options)
    learned, scores = learn_features(prompted, taught)
    record = lesson_record(model, taught, scores)
    learned = learned.with_lessons([*model.tasks, record])
    if scores is not None:
        truth = taught.rows[taught.held_out]
        error = calibration.expected_calibration_error(scores, truth, learned.temperature)
        record = record.model_copy(update={"calibration_error": error})
    forgotten: dict[str, tuple[float, float]] = {}
    if before is not None:
        after = scored_again(learned, before, options)
        record = record.model_copy(update={"watched": watched(before, after)})
        forgotten = {
            name: (each.accuracy, after.accuracies[name].accuracy)
            for name, each in before.accuracies.items()
        }
    learned = replace(learned, tasks=(*model.tasks, record))
    return learned, Learned(
        new=tuple(record.new),
        continued=tuple(record.continued),
        images=record.images,
        held_out=record.held_out,
        accuracy=record.accuracy,
        accuracy_own=record.accuracy_own,
        calibration_error=record.calibration_error,
        seconds=time.perf_counter() - started,
        warnings=tuple(warnings),
        left_out=tuple(str(each) for each in (*taught.images.left_out, *taught.read.bad)),
        forgotten=forgotten,
        checked={} if before is None else before.counts,
        hints=tuple(hints),
        held_out_images=tuple(taught.read.positions[taught.held_out].tolist()),
    )


# -- its steps


def read_lesson(model: LearnedModel, images: Labelled, options: LessonOptions) -> Taught:
    """Read the images, number their classes and choose those that are held out.

    Raises:
        BadOption: `validation` is no share.
        BadImages, Interrupted: As `read_images`.
        MissingExtra: Prompts would be trained, and torch is not installed.
    """
    if trains_prompts(model) and importlib.util.find_spec("torch") is None:
        raise MissingExtra(f"A lesson of {model.method}", "research")
    if not 0 <= options.validation < 1:
        raise BadOption("learn", "validation", f"{options.validation} is not in [0, 1)")
    asked = options.find_duplicates
    hashing = bool(len(model.hashes)) if asked is None else asked
    read = read_images(model.encoder, model.prompts, images, options, hashing=hashing)
    images = _with_remarks(images.selected(read.positions), images.names)
    names = list(dict.fromkeys((*model.classes, *images.names)))
    rows = np.array([names.index(name) for name in images.names])[images.split.labels]
    held_out = hold_out(rows, names, options.validation, model.options.seed)
    return Taught(images, read, names, rows, held_out)


def _with_remarks(images: Labelled, named: Sequence[str]) -> Labelled:
    """Say which of the named classes have no image left."""
    remarks = [
        f"class '{name}' has no image that can be read: left out"
        for name in named
        if name not in images.names
    ]
    return replace(images, remarks=(*images.remarks, *remarks))


def lesson_hints(model: LearnedModel, taught: Taught) -> list[str]:
    """Return what looks wrong with the images, beside each other and those learned before."""
    plain, name = taught.read.plain, taught.images.name
    suited = not findings.images_of_other_kind(model, taught.read.samples)
    moments = model.detector.moments
    features = plain[:, : model.encoder.width]
    hints = findings.lesson_hints(features, taught.rows, taught.names, moments, name, suited)
    continued = taught.rows < len(model.classes)
    if continued.any() and model.scorer.can_reject(DEFAULT_RATE):
        typicality = model.scorer.typicality(plain[continued])
        hints += findings.typicality_finding(typicality, "images of known classes")
    if taught.read.hashes.size:
        hints += findings.repeated_finding(taught.read.hashes, model.hashes, taught.names, name)
    return hints


def learn_features(
    model: LearnedModel, taught: Taught
) -> tuple[LearnedModel, NDArray[np.float64] | None]:
    """Add the images to everything that is a sum over images.

    Returns:
        The model without a record of the lesson, and the scores of the held-out images by what has
        learned the others; None if no image is held out.
    """
    read, rows, classes = taught.read, taught.rows, len(taught.names)
    measured = classifier = model.classifier
    if isinstance(classifier, Classifier):
        part = ~taught.held_out
        measured = classifier.learned(read.features[part], rows[part], classes)
        if not part.all():
            classifier = classifier.learned(read.features, rows, classes)
        else:
            classifier = measured
    hashes = model.hashes
    if read.hashes.size:
        hashes = hashes.learned(read.hashes, rows)
    detector = model.detector.learned(read.plain, rows, classes)
    scores = None
    if taught.held_out.any():
        scores = measured.scores(read.features[taught.held_out])
    return replace(model, classifier=classifier, detector=detector, hashes=hashes), scores


def read_images(
    encoder: Encoder,
    prompts: Prompts | None,
    images: Labelled,
    options: LessonOptions,
    *,
    hashing: bool = False,
) -> Read:
    """Decode each image once and compute its features, in a thread for each core.

    Raises:
        BadImages: Images that cannot be read, without `skip_bad`.
        Interrupted: `stop` became true.
    """
    count = len(images.split.labels)
    sampled = set(np.linspace(0, count - 1, min(count, MAX_SAMPLES)).astype(int).tolist())
    lock = threading.Lock()

    def one(index: int) -> tuple[EncodedImage, Sample | None, Hashes] | BadImage:
        try:
            image = images.decode(index, encoder.min_side, lock)
        except BadImage as problem:
            return problem
        size = image.info.get(FULL_SIZE, image.size)
        sample = Sample(size, is_drawing(image)) if index in sampled else None
        encoded = encoder.encode(image, prompts)
        return encoded, sample, image_hash(image) if hashing else np.zeros(0, np.uint8)

    results, bad = [], []
    for done, result in enumerate(in_threads(one, range(count)), 1):
        if options.stop():
            raise Interrupted
        if isinstance(result, BadImage):
            bad.append((done - 1, result))
        else:
            results.append((done - 1, *result))
        options.on_progress(Progress("reading images", done, count))
    if bad and not (options.skip_bad and results):
        raise BadImages([problem for _, problem in bad])
    return Read(
        np.array([position for position, *_ in results], np.int64),
        np.stack([encoded.features for _, encoded, _, _ in results]),
        np.stack([encoded.plain for _, encoded, _, _ in results]),
        [sample for _, _, sample, _ in results if sample is not None],
        np.stack([hashed for *_, hashed in results]),
        tuple(problem for _, problem in bad),
    )


def hold_out(rows: Rows, names: Sequence[str], share: float, seed: int) -> NDArray[np.bool_]:
    """Choose a share of each class with enough images; no more than leaves two to learn from."""
    chosen = np.zeros(len(rows), bool)
    for row in np.unique(rows).tolist():
        members = np.flatnonzero(rows == row)
        if share and len(members) >= MIN_IMAGES_TO_HOLD_OUT:
            count = min(max(1, round(share * len(members))), len(members) - MIN_IMAGES_TO_TRAIN)
            # Keyed by the class: the same images in any lesson, beside any other class.
            order = keyed_generator(seed, names[row], "held out").permutation(len(members))
            chosen[members[order[:count]]] = True
    return chosen


def trains_prompts(model: LearnedModel) -> bool:
    """Return whether the next lesson trains prompts, which needs torch.

    `coda-p` trains prompts and a head in every lesson, `coda-p-ranpac` prompts in the first one.
    """
    return model.method in PROMPTED and (model.prompts is None or not model.additive)


def train_prompts(
    model: LearnedModel, taught: Taught, options: LessonOptions
) -> tuple[LearnedModel, Taught]:
    """Train the prompts of a method that has them, and compute the features under them."""
    if not trains_prompts(model):
        return model, taught
    from coda_prompt.research.lessons import train  # the one call into that part

    trained = train(model, taught, options)
    classifier = model.classifier
    if isinstance(classifier, LinearHead):
        weight, bias = (trained[f"head.{name}.frozen"] for name in ("weight", "bias"))
        classifier = LinearHead(weight, bias)
    prompted = replace(model, trained=trained, classifier=classifier)
    again = read_images(model.encoder, prompted.prompts, taught.images, options)
    return prompted, replace(taught, read=replace(taught.read, features=again.features))


def lesson_record(
    model: LearnedModel, taught: Taught, scores: NDArray[np.float64] | None
) -> TaskRecord:
    """Describe the lesson, with accuracy and temperature measured on its held-out images.

    Args:
        model: What had been learned before.
        taught: The images.
        scores: Of the held-out images, by what has learned the others; None: there are none.
    """
    images, names, truth = taught.images, taught.names, taught.rows[taught.held_out]
    default = model.classifier.temperature
    temperature, fitted_on = default, 0
    over_all, within = None, None
    predictions: dict[str, dict[str, int]] = {}
    if scores is not None:
        if scores.shape[1] > 1:
            temperature = calibration.fit_temperature(scores, truth, default)
            fitted_on = len(truth)
        over_all, within = among_all_and_own(scores, truth, np.unique(taught.rows))
        for row, predicted in zip(truth.tolist(), scores.argmax(axis=1).tolist(), strict=True):
            counts = predictions.setdefault(names[row], {})
            counts[names[predicted]] = counts.get(names[predicted], 0) + 1
    return TaskRecord(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        new=names[len(model.classes) :],
        continued=[name for name in images.names if name in model.classes],
        images=images.counts(),
        held_out=len(truth),
        accuracy=over_all,
        accuracy_own=within,
        calibration_error=None,
        temperature=temperature,
        fitted_on=fitted_on,
        drawings=share_of_drawings(taught.read.samples),
        files=images.files_fingerprint,
        predictions=predictions,
    )


def share_of_drawings(samples: Sequence[Sample]) -> float | None:
    """Return the share of drawings; None if no sampled image could be read."""
    return sum(sample.drawing for sample in samples) / len(samples) if samples else None


# -- what a lesson costs earlier classes


@dataclass(frozen=True, eq=False)
class KnownScores:
    """How images of known classes are classified."""

    images: Labelled
    read: Read
    accuracies: dict[str, ClassAccuracy]

    @property
    def counts(self) -> dict[str, int]:
        """Number of images of each class."""
        return {name: each.images for name, each in self.accuracies.items()}


def known_scores(
    model: LearnedModel, images: Labelled | None, options: LessonOptions
) -> KnownScores | None:
    """Classify those of the images whose classes are known; None if there are none.

    Args:
        model: What classifies them.
        images: The images, also of other classes; None: there are none.
        options: Those of the lesson.
    """
    images = None if images is None else images.of_classes(model.classes)
    if images is None:
        return None
    read = read_images(model.encoder, model.prompts, images, options)
    images = images.selected(read.positions)
    return scored_again(model, KnownScores(images, read, {}), options, same_features=True)


def scored_again(
    model: LearnedModel,
    before: KnownScores,
    options: LessonOptions,
    *,
    same_features: bool = False,
) -> KnownScores:
    """Classify the same images with another model; their features change with its prompts."""
    images, read = before.images, before.read
    if model.method == "coda-p" and not same_features:
        read = read_images(model.encoder, model.prompts, images, options)
    truth = np.array([model.classes.index(name) for name in images.names])[images.split.labels]
    correct = model.scores(read.features).argmax(axis=1) == truth
    return KnownScores(images, read, accuracy_by_class(images.names, images.split.labels, correct))


def watched(before: KnownScores, after: KnownScores) -> WatchedAccuracy:
    """Return the accuracy on all images of earlier classes, before and after the lesson."""
    total = sum(each.images for each in before.accuracies.values())
    shares = [
        sum(each.images * each.accuracy for each in part.accuracies.values()) / total
        for part in (before, after)
    ]
    return WatchedAccuracy(
        classes=len(before.accuracies), images=total, before=shares[0], after=shares[1]
    )
