"""Training of prompts for a lesson of the classifier: its one call into this part."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coda_prompt.errors import BadOption, UnfinishedLesson
from coda_prompt.images.labelled import Labelled
from coda_prompt.learner.lesson import LessonOptions, Taught
from coda_prompt.learner.model import PROMPT_NAMES, LearnedModel
from coda_prompt.learner.results import Progress
from coda_prompt.research import methods
from coda_prompt.research.methods.options import make_config
from coda_prompt.research.streams.samples import Samples
from coda_prompt.research.streams.stream import Task
from coda_prompt.research.tensors import as_arrays, as_tensors
from coda_prompt.research.training.augmentation import Augmentation
from coda_prompt.research.training.checkpointing import Checkpointer
from coda_prompt.research.training.devices import Devices
from coda_prompt.research.training.engine import Engine
from coda_prompt.research.training.loading import Views
from coda_prompt.research.training.settings import Event, Training
from coda_prompt.research.vit.catalog import CATALOG, load_backbone
from coda_prompt.storage.files import as_json

METHOD = "coda-p"
DRAWING_TRAINING = {"epochs": 10, "batch_size": 16, "learning_rate": 1e-2}
PHOTO_TRAINING = {"micro_batch": 12}
"""On CPUs: larger passes are not faster there, and memory grows with them."""
DRAWING_AUGMENTATION = Augmentation(scale=(0.6, 1.0), ratio=(0.8, 1.25), flip=0.5)
NOT_IDENTIFYING = {"watched", "files", "predictions", "drawings"}
"""Fields of earlier lessons that do not influence a lesson."""


def train(model: LearnedModel, taught: Taught, options: LessonOptions) -> dict[str, NDArray[Any]]:
    """Train prompts and a head on the images of a lesson, after those of earlier lessons.

    Args:
        model: What has been learned before.
        taught: The images of the lesson, of which those held out are not trained on.
        options: How the lesson is learned.

    Returns:
        What has been trained so far; of `coda-p-ranpac` only the prompts, whose head is not used.

    Raises:
        BadOption: A training option cannot be used, or the encoder cannot be trained on.
        Interrupted: `stop` became true.
        UnfinishedLesson: There are checkpoints of a different lesson.
    """
    if not model.encoder.can_prompt:
        problem = f"{model.method} needs one ViT with prompts, such as photo-vit or pocket"
        raise BadOption("the classifier", "backbone", problem)
    backbone = load_backbone(_backbone_text(model))
    drawings = model.backbone.kind == "drawing"
    method = methods.make(METHOD, backbone.vit)
    if model.trained:
        method.load_learned_state(as_tensors(model.trained))
    fabric = Devices("auto", "32-true").fabric()
    defaults = DRAWING_TRAINING if drawings else PHOTO_TRAINING
    given = {**defaults, **options.training, "seed": model.options.seed}
    training = make_config(Training, "the training", given)
    views = (
        Views(backbone.preprocessing, DRAWING_AUGMENTATION, "squash")
        if drawings
        else Views(backbone.preprocessing)
    )

    def show(event: Event) -> None:
        if event.kind in ("step", "epoch"):
            stage = f"learning, epoch {event.epoch + 1}/{event.epochs}, loss {event.loss:.2f}"
            done = event.epoch * event.steps + event.step
            options.on_progress(Progress(stage, done, event.epochs * event.steps))

    engine = Engine(views, training, fabric=fabric, on_event=show, should_stop=options.stop)
    rows, images = taught.rows, taught.images
    positions, test = np.flatnonzero(~taught.held_out), np.flatnonzero(taught.held_out)
    task = Task(
        len(model.tasks),
        tuple(np.unique(rows).tolist()),
        Samples(images.split, positions, rows[positions]),
        Samples(images.split, test, rows[test]),
    )
    checkpointer = _checkpointer(model, images, training, options)
    engine.learn(method, task, checkpointer=checkpointer)
    state = as_arrays({name: each.clone() for name, each in method.learned_state().items()})
    if model.additive:
        return {f"{name}.frozen": state[f"{name}.frozen"] for name in PROMPT_NAMES}
    return state


def _backbone_text(model: LearnedModel) -> str:
    """Return how `load_backbone` is asked for the weights that the encoder was made from."""
    name, path = model.backbone.name, model.encoder.path
    if path is None:
        return name
    return f"{name}={path}" if name.partition("@")[0] in CATALOG else str(path)


def _checkpointer(
    model: LearnedModel, images: Labelled, training: Training, options: LessonOptions
) -> Checkpointer | None:
    """Open the checkpoints of a lesson, identified by everything that decides its result."""
    if options.progress is None:
        return None
    identity: dict[str, Any] = as_json(
        {
            "tasks": [task.model_dump(exclude=NOT_IDENTIFYING) for task in model.tasks],
            "images": images.fingerprint,
            "names": images.names,
            "validation": options.validation,
            "training": dataclasses.asdict(training),
            "method": model.method,
            "backbone": model.backbone.fingerprint,
        }
    )
    checkpointer = Checkpointer(options.progress, identity)
    other = checkpointer.other_training and checkpointer.other_training.identity
    if isinstance(other, dict) and other.get("tasks") == identity["tasks"]:
        raise UnfinishedLesson(options.progress)
    return checkpointer
