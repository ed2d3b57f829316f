"""`ContinualClassifier`: an image classifier that learns new classes without storing old images."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from coda_prompt import errors
from coda_prompt.images.inputs import Channels, image_items
from coda_prompt.images.labelled import Labelled, MemorySplit, labelled
from coda_prompt.learner import advice, feedback, store
from coda_prompt.learner.display import Predictions
from coda_prompt.learner.editable import EditableEstimator
from coda_prompt.learner.estimator import DEFAULT_METHOD
from coda_prompt.learner.evaluation import evaluate
from coda_prompt.learner.lesson import (
    can_resume,
    lesson_training,
    make_task,
    open_checkpoints,
    teach,
)
from coda_prompt.learner.loading import AUTO
from coda_prompt.learner.predictor import OnEvent, Prediction
from coda_prompt.learner.results import Evaluation, Learned
from coda_prompt.learner.unknown import DEFAULT_RATE, UnknownRule
from coda_prompt.research import methods
from coda_prompt.research.training.settings import QueryMode
from coda_prompt.research.training.snapshot import restored_on_error

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from typing_extensions import Self


class ContinualClassifier(EditableEstimator):
    """Classify images, and learn new classes at any time on top of a frozen backbone.

    Every call of `learn` is one lesson: it adds classes, or continues classes with more images.
    Images of earlier lessons are not stored and not needed again.

    Args:
        backbone: `auto` (at the first lesson `pocket` for drawings, `photo` for photographs), a
            name (`coda backbones` lists them), `NAME@SIZE` in pixels, `NAME=PATH` for weights in a
            local file, or the path of a `.safetensors` file.
        method: A name (`coda methods` lists them) or `path/to/file.py:Class`.
        options: Options of the method (`coda methods NAME` lists them), such as `{"width": 256}`.
        training: Options of the training: `epochs`, `batch_size`, `learning_rate`, `seed`, ...
        device: `auto`, `cpu`, `cuda` or `mps`.
        precision: Of predictions: `32-true` or `bf16-mixed`. Default: bfloat16 where that is
            faster and the backbone has a width of 256 or more, else float32. Lessons are in
            float32. With several processes or `fabric`, it is that of the Fabric, also for lessons.
        verbose: Show progress on standard error, and warn (`warnings.warn`) about images that
            should be checked. Without it, warnings are only in the result of `learn`.
        fabric: A launched Fabric, instead of `device`: the devices that share the work. Every
            process then makes the same calls.
        **more: Single options of the method or the training: `ContinualClassifier(epochs=3)` is
            `ContinualClassifier(training={"epochs": 3})`.

    The backbone is loaded, and options are checked, when they are first needed.

    Raises:
        BadOption: The method needs old images again or trains the backbone.
        UnknownName: There is no such method.

    Example:
        ```python
        classifier = ContinualClassifier()
        classifier.learn("photos")  # photos/cat/*.jpg, photos/dog/*.jpg, ...
        classifier.learn("more-photos")
        print(classifier("image.jpg", top=3))
        classifier.save("my-model")
        ```
    """

    def fit(self, data: Any, labels: Any = None, **options: Any) -> Self:
        """Forget everything and learn the classes of `data`, as scikit-learn expects it.

        Args:
            data: As in `learn`.
            labels: As in `learn`.
            **options: As in `learn`.
        """
        self._reset()
        self.learn(data, labels, **options)
        return self

    def partial_fit(
        self, data: Any, labels: Any = None, classes: Any = None, **options: Any
    ) -> Self:
        """Learn the classes of `data` in addition: `learn`, for scikit-learn.

        Args:
            data: As in `learn`.
            labels: As in `learn`.
            classes: Not used; classes need not be named before they are learned.
            **options: As in `learn`.
        """
        self.learn(data, labels, **options)
        return self

    def learn(
        self,
        data: Any,
        labels: Any = None,
        *,
        validation: float = 0.2,
        check: Any = None,
        skip_bad: bool = False,
        channels: Channels = "rgb",
        epochs: int | None = None,
        queries: QueryMode | None = None,
        views: int | None = None,
        find_duplicates: bool | None = None,
        progress: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_event: OnEvent | None = None,
    ) -> Learned:
        """Learn the classes of `data`: new classes, and more images of known ones.

        If this fails or is interrupted, the classifier is left unchanged.

        Args:
            data: A folder of class folders, `hub:owner/name`, or a dataset, `DataLoader` or
                generator of (image, label) pairs. Together with `labels`: images, as in `predict`.
            labels: Class names, one for each image, or one name for all of them.
            validation: Share of each class that is held out to measure accuracy and to calibrate
                probabilities.
            check: Labelled images of known classes. They are evaluated before and after, to show
                what this lesson made the model forget.
            skip_bad: Leave out images that cannot be read instead of failing.
            channels: Order of the colours in arrays: `rgb`, or `bgr` as in frames of OpenCV.
            epochs: Passes over the images, for this lesson only.
            queries: Where prompt queries come from, for this lesson only.
            views: Augmented views per image, reused, for this lesson only.
            find_duplicates: Name images that resemble one of an earlier lesson that had this
                option. Stores a hash of 15 bytes of each image of this lesson in the model.
                Default: as in the lessons before.
            progress: A folder for checkpoints. The same call resumes an interrupted one from
                there; `save` removes the folder.
            stop: Polled between steps and batches; once true, the lesson is checkpointed and ends.
            on_event: Called with the progress of the training.

        Returns:
            What was learned and how accurate it is.

        Raises:
            BadImages: Images that cannot be read, without `skip_bad`.
            BadOption: The data or an option cannot be used.
            Interrupted: `stop` became true.
            UnfinishedLesson: `progress` has checkpoints of a different lesson.

        Example:
            ```python
            learned = classifier.learn("photos", check="validation-photos")
            print(learned.accuracy, learned.forgotten)
            ```
        """
        from coda_prompt.research.training.engine import Engine  # slow to import

        started = time.perf_counter()
        images = labelled(data, labels, skip_bad=skip_bad, channels=channels)
        chosen = self.choose_backbone(images) if self.backbone == AUTO else None
        network, fabric = self.network, self.network.fabric
        training = lesson_training(network, epochs=epochs, queries=queries, views=views)
        checked = None if check is None else labelled(check, part="test", skip_bad=skip_bad)
        warnings = advice.warnings(network, images, checked)
        shown = self.verbose and fabric.global_rank == 0
        if shown:
            feedback.LOGGER.info("%s; %s", chosen or network.backbone_name, advice.summary(images))
            feedback.warn(warnings)
        bar = feedback.LearnerProgress() if shown and on_event is None else None
        show = bar.on_event if bar else on_event or (lambda event: None)
        engine = Engine(network.views, training, fabric=fabric, on_event=show, should_stop=stop)
        checkpointer = None
        if progress is not None:
            checkpointer = open_checkpoints(network, progress, images, training, validation)
        task = make_task(network, images, validation)
        stored = self._home is not None and chosen is None  # with nothing learned yet
        previous = self._model() if network.classes or stored else None
        with bar or contextlib.nullcontext(), restored_on_error(network.method):
            try:
                record, temperature, learned = teach(
                    network, images, task, engine, checkpointer, checked, find_duplicates
                )
            except Exception as error:
                if checkpointer is not None and not can_resume(error):
                    checkpointer.remove()
                raise
        if shown:
            feedback.warn(learned.hints)
        self._checkpointer = checkpointer
        self._replace(previous, [*network.tasks, record], temperature=temperature)
        seconds = time.perf_counter() - started
        return replace(learned, seconds=seconds, warnings=tuple(warnings), chosen=chosen)

    def choose_backbone(self, images: Labelled) -> str | None:
        """Resolve `auto` by the images of the first lesson; later lessons keep the backbone.

        Returns:
            Which backbone and why; None if there was nothing to choose.
        """
        network = self._network
        if self.backbone != AUTO or (network is not None and network.tasks):
            return None
        name, reason = advice.choose_backbone(images.samples)
        if network is None or name != network.backbone_name:
            self._network = self._build(name)
        return reason

    # -- predicting

    def __call__(
        self,
        data: Any,
        *,
        top: int = 5,
        unknown: float | Literal["auto"] | None = None,
        unknown_rate: float = DEFAULT_RATE,
        channels: Channels = "rgb",
    ) -> Predictions:
        """Classify images; the result prints as a table, plots, and converts to dicts.

        Args:
            data: As in `predict`.
            top: Number of classes to name.
            unknown: With `auto`, an image is unknown if it is not typical of the learned classes;
                with a number, if its most likely class is less likely than this.
            unknown_rate: The share of images of learned classes that `auto` may reject by mistake.
            channels: Order of the colours in arrays: `rgb`, or `bgr` as in frames of OpenCV.

        Example:
            ```python
            results = classifier("image.jpg", top=3, unknown="auto")
            print(results)
            results.plot("results.png")
            results.to_dicts()
            ```
        """
        if isinstance(unknown, bool):
            raise errors.BadOption("predict", "unknown", "give 'auto' or a probability")
        auto, below = (unknown, 0.0) if isinstance(unknown, str) else (None, unknown or 0.0)
        rule = UnknownRule.parse(auto, unknown_rate, below)
        images = image_items(data, channels)
        answers = self.predictor.predict(images, top=top, rule=rule)
        return Predictions(images, [answer for _, answer in answers])

    def predict(self, data: Any, *, channels: Channels = "rgb") -> NDArray[np.str_]:
        """Return the most likely class of each image.

        Args:
            data: One or many images: paths, `file://` URLs, bytes, file objects, PIL images,
                arrays or tensors; a folder stands for the images in it. Also a generator, a
                `DataLoader`, or a `Dataset` of Hugging Face.
            channels: Order of the colours in arrays: `rgb`, or `bgr` as in frames of OpenCV.

        Returns:
            One class name for each image.

        Raises:
            BadImages: Images that cannot be read.
            NotLearned: No class has been learned yet.
        """
        predictions = self.predictor.predict(image_items(data, channels), top=1)
        return np.array([prediction.best for _, prediction in predictions], dtype=str)

    def predictions(
        self,
        data: Any,
        *,
        top: int = 5,
        unknown: Literal["auto"] | None = None,
        unknown_rate: float = DEFAULT_RATE,
        unknown_below: float = 0.0,
    ) -> list[Prediction]:
        """Return the most likely classes of each image with their probabilities.

        Args:
            data: One or many paths, PIL images, arrays or tensors.
            top: Number of classes to name.
            unknown: With `auto`, an image is unknown if it is not typical of the learned classes.
            unknown_rate: The share of images of learned classes that `auto` may reject by mistake.
            unknown_below: An image is unknown if its most likely class is less likely than this.

        Raises:
            BadOption: The model was made with too few images for `auto`.

        Example:
            ```python
            (prediction,) = classifier.predictions("image.jpg", unknown="auto")
            print("unknown" if prediction.unknown else prediction.label, prediction.probability)
            ```
        """
        images = image_items(data)
        rule = UnknownRule.parse(unknown, unknown_rate, unknown_below)
        predictions = self.predictor.predict(images, top=top, rule=rule)
        return [prediction for _, prediction in predictions]

    def predict_proba(self, data: Any) -> NDArray[np.float64]:
        """Return calibrated probabilities, images x classes, in the order of `classes_`."""
        predictor, images = self.predictor, image_items(data)
        split = MemorySplit(images, np.zeros(len(images), np.int64))
        return predictor.calibrated(predictor.split_logits(split)).numpy()

    def score(self, data: Any, labels: Any = None) -> float:
        """Return the share of images that are classified correctly."""
        return self.evaluate(data, labels).accuracy

    def evaluate(
        self,
        data: Any,
        labels: Any = None,
        *,
        unknown: Any = None,
        unknown_rate: float = DEFAULT_RATE,
        skip_bad: bool = False,
        on_event: OnEvent | None = None,
    ) -> Evaluation:
        """Measure accuracy overall, for each class and for each lesson, among all known classes.

        Args:
            data: Labelled images, as for `learn`.
            labels: Class names, one for each image.
            unknown: Images of classes that were not learned, as for `predict`: measure how well
                they are separated from `data`.
            unknown_rate: The share of `data` that may be rejected by mistake.
            skip_bad: Leave out images that cannot be read and classes that were not learned,
                instead of failing.
            on_event: Called with the progress.

        Raises:
            BadImages: Images that cannot be read, without `skip_bad`.
            BadOption: There are `unknown` images, and the model cannot recognise them.
            NotLearned: The images have classes that were not learned.
        """
        images = labelled(data, labels, part="test", skip_bad=skip_bad)
        if skip_bad and set(images.names) & set(self.classes_):
            images = images.only(self.classes_)
        others = None if unknown is None else image_items(unknown)
        return evaluate(self.network, images, on_event, others, unknown_rate)


def load_or_create(
    folder: Path,
    backbone: str | None,
    method: str | None,
    fabric: Fabric,
    removable: bool = False,
    one_stage: bool = False,
) -> ContinualClassifier:
    """Load the model in a folder, or make a new one if there is none.

    Args:
        folder: The model folder.
        backbone: As in `ContinualClassifier.load`.
        method: As in `ContinualClassifier.load`.
        fabric: The devices that share the work.
        removable: Classes can be forgotten without a trace.
        one_stage: Prompt queries come from the first blocks of the prompted pass.

    Raises:
        BadOption: The model was made with another backbone or method, or without `removable` or
            `one_stage`.
    """
    if not (folder / store.MODEL).exists():
        backbone, method = backbone or AUTO, method or DEFAULT_METHOD
        options: dict[str, Any] = {"removable": True} if removable else {}
        if one_stage:
            queries = methods.one_stage_options(methods.find(method))
            if not queries:
                raise errors.BadOption("coda learn", "queries", f"{method} has no prompts")
            options |= queries
        return ContinualClassifier(backbone, method, options=options, verbose=False, fabric=fabric)
    classifier = ContinualClassifier.load(
        folder, backbone=backbone, method=method, verbose=False, fabric=fabric
    )
    early = getattr(classifier.network.method.config, "query", None) == "early"
    for option, missing in (
        ("removable", removable and not classifier.removable),
        ("queries one-stage", one_stage and not early),
    ):
        if missing:
            problem = f"{folder} was made without it; it is decided at the first lesson"
            raise errors.BadOption("coda learn", option, problem)
    return classifier
