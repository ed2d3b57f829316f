"""Steps of a lesson: its engine, its task, its checkpoints and the record of its outcome."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coda_prompt import errors
from coda_prompt.images.labelled import Labelled
from coda_prompt.images.sources import FileSplit
from coda_prompt.learner import calibration
from coda_prompt.learner.advice import images_of_other_kind
from coda_prompt.learner.evaluation import accuracy, accuracy_by_class, rows
from coda_prompt.learner.hints import lesson_hints
from coda_prompt.learner.network import Network
from coda_prompt.learner.resemblance import typicality_finding
from coda_prompt.learner.results import ClassAccuracy, Learned
from coda_prompt.learner.store import TaskRecord, WatchedAccuracy
from coda_prompt.learner.unknown import DEFAULT_RATE, UnknownDetector
from coda_prompt.research.methods.options import make_config
from coda_prompt.research.seeding import keyed_generator
from coda_prompt.research.streams.stream import Samples, Task
from coda_prompt.research.training.checkpointing import Checkpointer
from coda_prompt.research.training.settings import Training
from coda_prompt.storage.files import as_json

if TYPE_CHECKING:
    from coda_prompt.research.training.engine import Engine

MIN_IMAGES_TO_HOLD_OUT, MIN_IMAGES_TO_TRAIN = 5, 2
NOT_IDENTIFYING = {"watched", "files", "predictions", "drawings"}
"""Fields of earlier lessons that do not influence a lesson."""


def lesson_training(network: Network, **options: Any) -> Training:
    """Return the training with options for one lesson only; those that are None change nothing."""
    if options["epochs"] is not None and network.method.closed_form:
        problem = f"{network.entry.name} has nothing to train; leave it out"
        raise errors.BadOption("learn", "epochs", problem)
    changes = {name: value for name, value in options.items() if value is not None}
    values = {**dataclasses.asdict(network.training), **changes}
    return make_config(Training, "the training", values)


def make_task(network: Network, images: Labelled, validation: float) -> Task:
    """Number the classes as rows of the head and hold out a share of each class."""
    if not 0 <= validation < 1:
        raise errors.BadOption("learn", "validation", f"{validation} is not in [0, 1)")
    index, known = len(network.tasks), network.classes
    names = [*known, *(name for name in images.names if name not in known)]
    own = np.array([names.index(name) for name in images.names])
    labels = own[images.split.labels]
    held_out = np.zeros(len(labels), bool)
    seed = network.training.seed
    for row, name in zip(own, images.names, strict=True):
        members = np.flatnonzero(labels == row)
        # Keyed by the class: it holds out the same images in any lesson, beside any other class.
        generator = keyed_generator(seed, name, "held out")
        order = torch.randperm(len(members), generator=generator).numpy()
        if validation and len(members) >= MIN_IMAGES_TO_HOLD_OUT:
            count = max(1, round(validation * len(members)))
            count = min(count, len(members) - MIN_IMAGES_TO_TRAIN)
            held_out[members[order[:count]]] = True
    train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    return Task(
        index,
        tuple(sorted(own.tolist())),
        Samples(images.split, train, labels[train]),
        Samples(images.split, test, labels[test]),
    )


def open_checkpoints(
    network: Network, folder: Path, images: Labelled, training: Training, validation: float
) -> Checkpointer:
    """Open the checkpoints of a lesson, identified by everything that decides its result.

    Raises:
        UnfinishedLesson: The folder has checkpoints of a different lesson.
    """
    sha256 = network.entry.sha256
    identity: dict[str, Any] = as_json(
        {
            "tasks": [task.model_dump(exclude=NOT_IDENTIFYING) for task in network.tasks],
            "images": images.fingerprint,
            "names": images.names,
            "validation": validation,
            "training": dataclasses.asdict(training),
            "method": [network.entry.name, dataclasses.asdict(network.method.config)],
            **({} if sha256 is None else {"method_file": sha256}),
            "backbone": network.fingerprint,
        }
    )
    checkpointer = Checkpointer(folder, identity, writes=network.fabric.global_rank == 0)
    other = checkpointer.other_training and checkpointer.other_training.identity
    if isinstance(other, dict) and other.get("tasks") == identity["tasks"]:
        raise errors.UnfinishedLesson(folder)
    return checkpointer


def teach(
    network: Network,
    images: Labelled,
    task: Task,
    engine: Engine,
    checkpointer: Checkpointer | None,
    checked: Labelled | None,
    find_duplicates: bool | None,
) -> tuple[TaskRecord, float, Learned]:
    """Train the method, and let the detector of unknown images and the hashes learn the images.

    Args:
        network: What learns; its list of lessons is not changed.
        images: The images of the lesson.
        task: The same, numbered and split.
        engine: Trains the method.
        checkpointer: Saves the training; a training that it has saved before is resumed.
        checked: Images of known classes, which are evaluated before and after.
        find_duplicates: Compare the images with those of earlier lessons; None: if these did.

    Returns:
        The record of the lesson for the model, the temperature of the probabilities after it, and
        its outcome for the caller.
    """
    known, detector, hashes = network.classes, network.detector, network.hashes
    before, after, repeated = {}, {}, list[str]()
    if checked is not None:
        before = known_accuracies(network, checked, known, engine)
    tokens = engine.plain_tokens(network.method, task.train)
    engine.learn(network.method, task, checkpointer=checkpointer)
    labels, positions = torch.from_numpy(task.train.labels), task.train.indices
    taught = detector.learned(tokens, labels, network.method.classes_seen)
    record, temperature = make_record(network, images, task, engine, taught)
    if before and checked is not None:
        after = known_accuracies(network, checked, known, engine)
        record = record.model_copy(update={"watched": watched_accuracy(before, after)})
    names = [*known, *record.new]
    class_tokens = tokens[:, : network.method.vit_config.width]
    hints = lesson_hints(
        class_tokens,
        labels,
        names,
        detector,
        lambda at: images.name(positions[at]),
        suited=not images_of_other_kind(network, images),
    )
    continued = labels < len(known)
    if continued.any() and network.predictor.scorer.can_reject(DEFAULT_RATE):
        typicality = network.predictor.scorer(tokens[continued].cpu())
        hints += tuple(typicality_finding(typicality, "images of known classes"))
    if len(hashes.rows) if find_duplicates is None else find_duplicates:
        hashes, repeated = hashes.learned(images, names)
    # Assigned at the end: if anything above fails, the network is as before.
    network.detector, network.hashes = taught, hashes
    outcome = Learned(
        new=tuple(record.new),
        continued=tuple(record.continued),
        images=record.images,
        held_out=record.held_out,
        accuracy=record.accuracy,
        accuracy_own=record.accuracy_own,
        calibration_error=record.calibration_error,
        left_out=tuple(str(problem) for problem in images.bad),
        forgotten={name: (before[name].accuracy, after[name].accuracy) for name in before},
        checked={name: before[name].images for name in before},
        hints=(*hints, *repeated),
        held_out_images=tuple(task.test.indices.tolist()),
    )
    return record, temperature, outcome


def can_resume(error: Exception) -> bool:
    """Return whether the same lesson may succeed when it is repeated.

    It may if it was interrupted, or lacked a file, memory or a process; not if the training or a
    method of the user's own is wrong.
    """
    if isinstance(error, errors.NonFiniteLoss | errors.BadMethod):
        return False
    temporary = (errors.CodaError, OSError, MemoryError, torch.cuda.OutOfMemoryError)
    return isinstance(error, temporary)


def make_record(
    network: Network,
    images: Labelled,
    task: Task,
    engine: Engine,
    detector: UnknownDetector,
) -> tuple[TaskRecord, float]:
    """Describe the lesson, with accuracy and temperature measured on its held-out images.

    Also return the temperature of the probabilities after the lesson.

    Args:
        network: What has learned the lesson.
        images: The images of the lesson.
        task: The same, numbered and split.
        engine: Computes the logits of held-out images.
        detector: Has learned the lesson too; its statistics determine the temperature.
    """
    known, temperature, fitted_on = network.classes, network.method.temperature, 0
    over_all, within, error = None, None, None
    new = [name for name in images.names if name not in known]
    predictions: dict[str, dict[str, int]] = {}
    if len(task.test):
        labels = torch.from_numpy(task.test.labels)
        logits = engine.logits(network.method, task.test)
        if logits.shape[1] > 1:
            temperature = calibration.fit_temperature(logits, labels, temperature)
            fitted_on = len(labels)
        over_all, within = accuracy(logits, labels, torch.tensor(task.classes))
        names = [*known, *new]
        for row, predicted in zip(labels.tolist(), logits.argmax(dim=1).tolist(), strict=True):
            counts = predictions.setdefault(names[row], {})
            counts[names[predicted]] = counts.get(names[predicted], 0) + 1
    fits = [(each.temperature, each.fitted_on) for each in network.tasks]
    used = network.fitted_temperature([*fits, (temperature, fitted_on)], detector)
    if len(task.test):
        error = calibration.expected_calibration_error(logits, labels, used)
    record = TaskRecord(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        new=new,
        continued=[name for name in images.names if name in known],
        images=images.counts(),
        held_out=len(task.test),
        accuracy=over_all,
        accuracy_own=within,
        calibration_error=error,
        temperature=temperature,
        fitted_on=fitted_on,
        drawings=sum(sample.drawing for sample in images.samples) / len(images.samples),
        files=images.fingerprint if isinstance(images.split, FileSplit) else None,
        predictions=predictions,
    )
    return record, used


def watched_accuracy(
    before: dict[str, ClassAccuracy], after: dict[str, ClassAccuracy]
) -> WatchedAccuracy:
    """Measure the accuracy on all images of older classes."""
    images = sum(each.images for each in before.values())
    shares = [
        sum(each.images * each.accuracy for each in part.values()) / images
        for part in (before, after)
    ]
    return WatchedAccuracy(classes=len(before), images=images, before=shares[0], after=shares[1])


def known_accuracies(
    network: Network, images: Labelled, names: list[str], engine: Engine
) -> dict[str, ClassAccuracy]:
    """Measure the accuracy of each of the classes `names` that is among the images."""
    wanted = [row for row, name in enumerate(images.names) if name in names]
    indices = np.flatnonzero(np.isin(images.split.labels, wanted))
    if not len(indices):
        return {}
    labels = images.split.labels[indices]
    truth = [images.names[label] for label in labels]
    logits = engine.logits(network.method, Samples(images.split, indices, labels))
    correct = logits.argmax(dim=1) == rows(truth, names)
    return accuracy_by_class(images, indices, correct)
