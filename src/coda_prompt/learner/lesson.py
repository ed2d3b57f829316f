"""One lesson, from images to what the model is afterwards and what there is to tell about it."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    if not 0 <= options.validation < 1:
        raise BadOption("learn", "validation", f"{options.validation} is not in [0, 1)")
    hashing = (
        bool(len(model.hashes)) if options.find_duplicates is None else options.find_duplicates
    )
    read = read_images(model.encoder, model.prompts, images, options, hashing=hashing)
    images = images.selected(read.positions)
    known, names = model.classes, [*model.classes]
    names += [name for name in images.names if name not in known]
    rows = np.array([names.index(name) for name in images.names])[images.split.labels]
    held_out = hold_out(rows, names, options.validation, model.options.seed)

    before = known_scores(model, checked, options)
    warnings = findings.image_findings(model, images, read.samples, checked)
    suited = not findings.images_of_other_kind(model, read.samples)
    hints = findings.lesson_hints(
        read.plain, rows, names, model.detector.moments, partial(images.name), suited
    )
    prompted, read = train_prompts(model, images, rows, held_out, read, options)
    measured = prompted.classifier
    detector = prompted.detector.learned(read.plain, rows, len(names))
    if isinstance(measured, Classifier):
        taught = measured.learned(read.features, rows, len(names))
        if held_out.any():
            part = ~held_out
            measured = measured.learned(read.features[part], rows[part], len(names))
        prompted = replace(prompted, classifier=taught)
    scores = measured.scores(read.features[held_out]) if held_out.any() else None
    record = lesson_record(model, images, read, rows[held_out], scores)
    continued = rows < len(known)
    if continued.any() and model.scorer.can_reject(DEFAULT_RATE):
        typicality = model.scorer.typicality(read.plain[continued])
        hints += findings.typicality_finding(typicality, "images of known classes")
    hashes = model.hashes
    if hashing:
        hints += findings.repeated_finding(read.hashes, hashes, names, images.name)
        hashes = hashes.learned(read.hashes, rows)
    learned = replace(prompted, detector=detector, hashes=hashes)
    learned = learned.with_lessons([*model.tasks, record])
    if scores is not None:
        error = calibration.expected_calibration_error(scores, rows[held_out], learned.temperature)
        record = record.model_copy(update={"calibration_error": error})
    accuracies: dict[str, tuple[float, float]] = {}
    checked_images: dict[str, int] = {}
    if before is not None:
        after = scored_again(learned, before, options)
        record = record.model_copy(update={"watched": watched(before, after)})
        accuracies = {
            name: (each.accuracy, after.accuracies[name].accuracy)
            for name, each in before.accuracies.items()
        }
        checked_images = {name: each.images for name, each in before.accuracies.items()}
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
        left_out=tuple(str(problem) for problem in (*images.left_out, *read.bad)),
        forgotten=accuracies,
        checked=checked_images,
        hints=tuple(hints),
        held_out_images=tuple(read.positions[held_out].tolist()),
    )


# -- its steps


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


def train_prompts(
    model: LearnedModel,
    images: Labelled,
    rows: Rows,
    held_out: NDArray[np.bool_],
    read: Read,
    options: LessonOptions,
) -> tuple[LearnedModel, Read]:
    """Train the prompts of a method that has them, and compute the features under them.

    `coda-p` trains prompts and a head in every lesson, `coda-p-ranpac` prompts in the first one.

    Raises:
        MissingExtra: Prompts are trained, and torch is not installed.
    """
    if model.method not in PROMPTED or (model.prompts is not None and model.additive):
        return model, read
    try:
        from coda_prompt.research.lessons import train
    except ModuleNotFoundError as error:
        raise MissingExtra(f"a lesson of {model.method}", "research") from error
    trained = train(model, images, rows, held_out, options)
    classifier = model.classifier
    if isinstance(classifier, LinearHead):
        weight, bias = (trained[f"head.{name}.frozen"] for name in ("weight", "bias"))
        classifier = LinearHead(weight, bias)
    prompted = replace(model, trained=trained, classifier=classifier)
    again = replace(options, skip_bad=False)
    return prompted, replace(
        read, features=read_images(model.encoder, prompted.prompts, images, again).features
    )


def lesson_record(
    model: LearnedModel,
    images: Labelled,
    read: Read,
    truth: Rows,
    scores: NDArray[np.float64] | None,
) -> TaskRecord:
    """Describe the lesson, with accuracy and temperature measured on its held-out images.

    Args:
        model: What had been learned before.
        images: The images of the lesson.
        read: The same.
        truth: Rows of the held-out images.
        scores: Of the held-out images, by what has learned the others; None: there are none.
    """
    known = model.classes
    new = [name for name in images.names if name not in known]
    names = [*known, *new]
    default = model.classifier.default_temperature
    temperature, fitted_on = default, 0
    over_all, within = None, None
    predictions: dict[str, dict[str, int]] = {}
    if scores is not None:
        if scores.shape[1] > 1:
            temperature = calibration.fit_temperature(scores, truth, default)
            fitted_on = len(truth)
        own = np.array(sorted(names.index(name) for name in images.names))
        over_all, within = among_all_and_own(scores, truth, own)
        for row, predicted in zip(truth.tolist(), scores.argmax(axis=1).tolist(), strict=True):
            counts = predictions.setdefault(names[row], {})
            counts[names[predicted]] = counts.get(names[predicted], 0) + 1
    return TaskRecord(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        new=new,
        continued=[name for name in images.names if name in known],
        images=images.counts(),
        held_out=len(truth),
        accuracy=over_all,
        accuracy_own=within,
        calibration_error=None,
        temperature=temperature,
        fitted_on=fitted_on,
        drawings=share_of_drawings(read.samples),
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
