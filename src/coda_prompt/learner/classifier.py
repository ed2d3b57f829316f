"""`ContinualClassifier`: an image classifier that learns new classes without storing old images."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

from coda_prompt import errors, methods
from coda_prompt.data.resolve import Labelled, MemorySplit, image_items, labelled
from coda_prompt.learner import advice, loading, store
from coda_prompt.learner.evaluation import evaluate
from coda_prompt.learner.lesson import (
    known_accuracies,
    make_engine,
    make_record,
    make_task,
    open_checkpoints,
)
from coda_prompt.learner.loading import AUTO, TRAINING_FIELDS
from coda_prompt.learner.network import Network
from coda_prompt.learner.predictor import OnEvent, Prediction, Predictor
from coda_prompt.learner.results import Evaluation, Learned
from coda_prompt.learner.unknown import DEFAULT_RATE, UnknownRule
from coda_prompt.training.checkpointing import Checkpointer
from coda_prompt.training.devices import Devices
from coda_prompt.training.queries import QueryMode
from coda_prompt.training.snapshot import restored_on_error

DEFAULT_METHOD = "ranpac"


class ContinualClassifier:
    """Classify images, and learn new classes at any time on top of a frozen backbone.

    Every call of `learn` is one lesson: it adds classes, or continues classes with more images.
    Images of earlier lessons are not stored and not needed again.

    Args:
        backbone: `auto` (at the first lesson `pocket` for drawings, `photo` for photographs), a
            name (`coda backbones` lists them), `NAME@SIZE` in pixels, `NAME=PATH` for weights in a
            local file, or the path of a `.safetensors` file.
        method: A name (`coda methods` lists them) or `path/to/file.py:Class`.
        device: `auto`, `cpu`, `cuda` or `mps`.
        fabric: A launched Fabric, instead of `device`: the devices that share the work. Every
            process then makes the same calls.
        **options: Options of the method (`coda methods NAME` lists them) and of the training
            (`epochs`, `batch_size`, `learning_rate`, `seed`, ...).

    Raises:
        BadOption: The method needs old images again or trains the backbone, or an option has an
            unusable value.
        UnknownName: There is no such backbone, method or option.

    Example:
        ```python
        classifier = ContinualClassifier()
        classifier.learn("photos")  # photos/cat/*.jpg, photos/dog/*.jpg, ...
        classifier.learn("more-photos")
        classifier.predict(["image.jpg"])
        classifier.save("my-model")
        ```
    """

    def __init__(
        self,
        backbone: str = AUTO,
        method: str = DEFAULT_METHOD,
        *,
        device: str = "auto",
        fabric: Fabric | None = None,
        **options: Any,
    ) -> None:
        entry = methods.find(method)
        _check_suitable(entry, method)
        self._entry, self._fabric = entry, fabric or Devices(device).fabric()
        self._training = {name: options[name] for name in options if name in TRAINING_FIELDS}
        self._options = {name: options[name] for name in options if name not in TRAINING_FIELDS}
        self._auto = backbone == AUTO
        self.network = self._build("pocket" if self._auto else backbone)
        """The method, its backbone and the lessons learned so far."""
        self._saved: store.Model | None = None
        """The model as read or written; None if it has changed since."""
        self._previous: store.Model | Path | None = None
        """The model before the newest task, or the folder to read it from when needed."""
        self._checkpointer: Checkpointer | None = None
        """Checkpoints of the newest task, removed when the model is saved."""
        self._home: tuple[Path, str | None] | None = None
        """The folder last read or written, and the hash of the model in it."""

    def _build(self, backbone: str) -> Network:
        """Load a backbone and make the method on it, with nothing learned."""
        return Network(backbone, self._entry, self._options, self._training, self._fabric)

    @property
    def method_name(self) -> str:
        """Name of the method."""
        return self._entry.name

    @property
    def backbone_name(self) -> str:
        """Name of the backbone; with `auto`, the one that was chosen."""
        return self.network.backbone_name

    @property
    def classes_(self) -> list[str]:
        """Class names, in the order in which they were learned."""
        return self.network.classes

    @property
    def temperature(self) -> float:
        """Divides the logits before they become probabilities; fitted on held-out images."""
        return self.network.temperature

    @property
    def tasks_(self) -> list[dict[str, Any]]:
        """One record for each lesson: date, classes, images, accuracy at the time."""
        return [task.model_dump() for task in self.network.tasks]

    @property
    def predictor(self) -> Predictor:
        """Classifies images with what has been learned so far.

        Raises:
            NotLearned: No class has been learned yet.
        """
        network = self.network
        if not network.tasks:
            raise errors.NotLearned([], [])
        return network.predictor

    # -- learning

    def learn(
        self,
        data: Any,
        labels: Any = None,
        *,
        validation: float = 0.2,
        watch: Any = None,
        skip_bad: bool = False,
        epochs: int | None = None,
        queries: QueryMode | None = None,
        progress: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_event: OnEvent | None = None,
    ) -> Learned:
        """Learn the classes of `data`: new classes, and more images of known ones.

        If this fails or is interrupted, the classifier is left unchanged.

        Args:
            data: A folder of class folders, `hub:owner/name`, `shards:` and a path, or a dataset
                of (image, label) pairs. Together with `labels`: paths, PIL images or arrays.
            labels: Class names, one for each image.
            validation: Share of each class that is held out to measure accuracy and to calibrate
                probabilities.
            watch: Labelled images of known classes. They are evaluated before and after, to show
                what this lesson made the model forget.
            skip_bad: Leave out images that cannot be read instead of failing.
            epochs: Passes over the images, for this lesson only.
            queries: Where prompt queries come from, for this lesson only.
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
            learned = classifier.learn("photos", watch="validation-photos")
            print(learned.accuracy, learned.forgotten)
            ```
        """
        if not 0 <= validation < 1:
            raise errors.BadOption("learn", "validation", f"{validation} is not in [0, 1)")
        started, images = time.perf_counter(), labelled(data, labels, skip_bad=skip_bad)
        chosen = self.choose_backbone(images)
        network = self.network
        engine = make_engine(network, epochs, queries, stop, on_event)
        watched = None if watch is None else labelled(watch, part="test", skip_bad=skip_bad)
        warnings = self.warnings(images, watched)
        known = network.classes
        previous = self._model() if known else None
        before, after = {}, {}
        checkpointer = None
        with restored_on_error(network.method):
            if watched is not None:
                before = known_accuracies(network, watched, known, engine)
            task = make_task(network, images, validation)
            if progress is not None:
                checkpointer = open_checkpoints(
                    network, progress, images, engine.training, validation
                )
            seen: list[tuple[Tensor, Tensor]] = []
            engine.learn(
                network.method,
                task,
                checkpointer=checkpointer,
                observe=lambda features, rows: seen.append((features, rows)),
            )
            record = make_record(network, images, task, engine)
            detector = network.detector
            if detector is not None:
                detector = detector.learned(*seen[0], network.method.classes_seen)
            if watched is not None:
                after = known_accuracies(network, watched, known, engine)
        network.detector = detector
        network.set_tasks([*network.tasks, record])
        self._checkpointer = checkpointer
        self._saved, self._previous = None, previous
        return Learned(
            new=tuple(record.new),
            continued=tuple(record.continued),
            images=record.images,
            held_out=record.held_out,
            accuracy=record.accuracy,
            accuracy_own=record.accuracy_own,
            calibration_error=record.calibration_error,
            seconds=time.perf_counter() - started,
            warnings=tuple(warnings),
            left_out=tuple(str(problem) for problem in images.bad),
            forgotten={name: (before[name].accuracy, after[name].accuracy) for name in before},
            chosen=chosen,
        )

    def choose_backbone(self, images: Labelled) -> str | None:
        """Resolve `auto` by the images of the first lesson; later lessons keep the backbone.

        Returns:
            Which backbone and why; None if there was nothing to choose.
        """
        if not self._auto or self.network.tasks:
            return None
        name, reason = advice.choose_backbone(images.samples)
        if name != self.network.backbone_name:
            self.network = self._build(name)
        return reason

    def warnings(self, images: Labelled, watched: Labelled | None = None) -> list[str]:
        """Return what a person should know before these images are learned."""
        network, known = self.network, self.network.classes
        preprocessing = network.views.preprocessing
        warnings = advice.warnings(images, known, network.backbone_name, preprocessing)
        if watched is not None and not set(watched.names) & set(known):
            warnings.append("none of the watched classes is known yet: nothing to forget")
        return warnings

    def undo(self) -> None:
        """Restore the model as it was before the newest lesson, bit for bit.

        Raises:
            NothingToUndo: There is no earlier version; only one is stored.
        """
        previous = self._previous_model()
        if previous is None:
            raise errors.NothingToUndo("The classifier")
        self.network.set_state(previous, "the previous version")
        self._saved, self._previous = previous, None

    # -- predicting

    def predict(self, data: Any) -> NDArray[np.str_]:
        """Return the most likely class of each image.

        Args:
            data: One or many paths, PIL images, arrays or tensors; a folder stands for the images
                in it.

        Returns:
            One class name for each image.

        Raises:
            BadImages: Images that cannot be read.
            NotLearned: No class has been learned yet.
        """
        return np.array([each.best for each in self.predictions(data, top=1)], dtype=str)

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
            BadOption: The model was made by an earlier version, or of too few images for this rate.

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
        logits = predictor.split_logits(split, range(len(images)))
        return predictor.calibrated(logits).numpy()

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
            unknown: Images of classes that were not learned, as for `predictions`: measure how well
                they are told apart from `data`.
            unknown_rate: The share of `data` that may be rejected by mistake.
            skip_bad: Leave out images that cannot be read instead of failing.
            on_event: Called with the progress.

        Raises:
            BadImages: Images that cannot be read, without `skip_bad`.
            BadOption: There are `unknown` images, and the model cannot recognise them.
            NotLearned: The images have classes that were not learned.
        """
        images = labelled(data, labels, part="test", skip_bad=skip_bad)
        others = None if unknown is None else image_items(unknown)
        return evaluate(self.network, images, on_event, others, unknown_rate)

    # -- saving and loading

    def save(self, folder: str | Path) -> None:
        """Write the model; if this is interrupted, the folder has one complete version.

        Raises:
            ModelChanged: Another process changed the folder since this classifier was loaded from
                it or saved to it.
        """
        folder = Path(folder)
        with store.exclusive_writer(folder):
            current = (folder.resolve(), store.model_sha256(folder))
            if self._home is not None and self._home[0] == current[0] and self._home != current:
                raise errors.ModelChanged(folder)
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the model like `save`, for a caller that has locked the folder."""
        model = self._model()
        store.write_model(folder, model, self._previous_model())
        self._saved, self._home = model, (folder.resolve(), store.model_sha256(folder))
        if self._checkpointer is not None:
            self._checkpointer.remove()
            self._checkpointer = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        backbone: str | None = None,
        method: str | None = None,
        device: str = "auto",
        fabric: Fabric | None = None,
    ) -> ContinualClassifier:
        """Load a saved model together with its backbone. No code in the folder is ever run.

        Args:
            folder: The model folder.
            backbone: The backbone's weights, if they are a file that has moved: `NAME=PATH` or
                `PATH`. The fingerprint is checked.
            method: `path/to/file.py:Class`, required if the model was made with a method of your
                own: a model stores the class name and the hash of the file, but no code.
            device: `auto`, `cpu`, `cuda` or `mps`.
            fabric: A launched Fabric, instead of `device`.

        Raises:
            BadOption: `method` is not the method the model was made with.
            CorruptFile: The model is damaged.
            MissingData: There is no model in the folder.
            BackboneMismatch: The backbone is not the one the model was made with.
        """
        folder = Path(folder)
        model = store.read_model(folder)
        training = loading.training_options(model.description, folder)
        method = loading.resolve_method(model.description, method, folder)
        backbone = loading.resolve_backbone(model.description.backbone, backbone, folder)
        options = {**model.description.options, **training}
        classifier = cls(backbone, method, device=device, fabric=fabric, **options)
        classifier.network.backbone_name = model.description.backbone.name
        classifier.network.check_backbone(model.description, folder)
        classifier.network.set_state(model, folder)
        classifier._saved, classifier._previous = model, folder
        classifier._home = (folder.resolve(), store.model_sha256(folder))
        return classifier

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model like `save`: the folder has the layout of the Hugging Face hub."""
        self.save(folder)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        backbone: str | None = None,
        method: str | None = None,
        device: str = "auto",
        token: str | None = None,
        endpoint: str | None = None,
    ) -> ContinualClassifier:
        """Load a model from a folder or from the Hugging Face hub.

        Args:
            name: A folder, or `owner/name` on the hub.
            revision: Branch, tag or commit on the hub.
            backbone: As in `load`.
            method: As in `load`.
            device: As in `load`.
            token: Access token of the hub.
            endpoint: URL of another hub.
        """
        if not Path(name).is_dir():
            from coda_prompt.learner.hub import download_model

            name = download_model(str(name), revision, token, endpoint)
        return cls.load(name, backbone=backbone, method=method, device=device)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload the model and its card to `owner/name` on the hub; return the commit's URL."""
        from coda_prompt.learner.hub import upload_model

        return upload_model(name, self._model(), private=private, token=token, endpoint=endpoint)

    def export_onnx(self, path: str | Path) -> None:
        """Write the model with its backbone as one ONNX graph, from pixels to probabilities.

        Raises:
            MissingExtra: The packages for ONNX are not installed.
            NotLearned: No class has been learned yet.
        """
        predictor = self.predictor
        from coda_prompt.learner.export import export_onnx

        export_onnx(predictor, self.network.preprocessing(), Path(path))

    def _model(self) -> store.Model:
        """Return the model to save."""
        return self.network.to_model() if self._saved is None else self._saved

    def _previous_model(self) -> store.Model | None:
        """Return the model before the newest task, unless another process has replaced it."""
        if isinstance(self._previous, Path):
            previous = store.read_previous(self._previous)
            tasks = self.network.tasks[:-1]
            follows = previous is not None and previous.description.tasks == tasks
            self._previous = previous if follows else None
        return self._previous


def load_or_create(
    folder: Path, backbone: str | None, method: str | None, fabric: Fabric
) -> ContinualClassifier:
    """Load the model in a folder, or make a new one if there is none.

    Raises:
        BadOption: The model was made with another backbone or method.
    """
    if not (folder / store.MODEL).exists():
        return ContinualClassifier(backbone or AUTO, method or DEFAULT_METHOD, fabric=fabric)
    return ContinualClassifier.load(folder, backbone=backbone, method=method, fabric=fabric)


def _check_suitable(entry: methods.Entry, name: str) -> None:
    """Refuse methods that need old images again or that would save a whole network."""
    if entry.type.keeps_images or entry.type.trains_on == "all":
        problem = f"{name} needs old images again, and this classifier keeps none"
    elif not entry.type.frozen_backbone:
        problem = f"{name} trains the whole network, and a model stores only what is added to it"
    else:
        return
    raise errors.BadOption(
        "ContinualClassifier", "method", f"{problem}; use {DEFAULT_METHOD} or coda-p"
    )
