"""`ContinualClassifier`: an image classifier that learns new classes without storing old images."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from coda_prompt import __version__, errors, methods
from coda_prompt.data.images import Augmentation
from coda_prompt.data.resolve import Labelled, MemorySplit, image_items, labelled
from coda_prompt.data.stream import Samples, Task
from coda_prompt.learner import advice, calibration, store
from coda_prompt.learner.predictor import OnEvent, Prediction, Predictor
from coda_prompt.learner.results import ClassAccuracy, Evaluation, Learned, TaskAccuracy
from coda_prompt.learner.store import Description, TaskRecord
from coda_prompt.methods.options import make_config
from coda_prompt.model.catalog import CATALOG, load_backbone, parse_backbone
from coda_prompt.preprocessing import Preprocessing
from coda_prompt.seeding import keyed_generator
from coda_prompt.storage.files import as_json, file_sha256
from coda_prompt.training.checkpointing import Checkpointer
from coda_prompt.training.devices import Devices
from coda_prompt.training.engine import Engine
from coda_prompt.training.loading import Views
from coda_prompt.training.queries import QueryMode
from coda_prompt.training.settings import Training
from coda_prompt.training.snapshot import restored_on_error

AUTO = "auto"
"""The backbone that suits the images of the first lesson."""
DEFAULT_METHOD = "ranpac"
MAX_PROJECTION = 2048
"""Random features of RanPAC in a model: limits its statistics to 8 MB for any backbone."""
MIN_IMAGES_TO_HOLD_OUT, MIN_IMAGES_TO_TRAIN = 5, 2
POCKET_TRAINING = {"epochs": 10, "batch_size": 16, "learning_rate": 1e-2}
POCKET_AUGMENTATION = Augmentation(scale=(0.6, 1.0), ratio=(0.8, 1.25), flip=0.5)


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
        self.method_name, self._entry, self._options = entry.name, entry, options
        self._fabric = fabric or Devices(device).fabric()
        self._auto = backbone == AUTO
        self._build("pocket" if self._auto else backbone)
        self._saved: store.Model | None = None
        """The model as read or written; None if it has changed since."""
        self._previous: store.Model | Path | None = None
        """The model before the newest task, or the folder to read it from when needed."""
        self._checkpointer: Checkpointer | None = None
        """Checkpoints of the newest task, removed when the model is saved."""
        self._home: tuple[Path, str | None] | None = None
        """The folder last read or written, and the hash of the model in it."""

    def _build(self, backbone: str) -> None:
        """Load a backbone and make the method on it, with nothing learned."""
        entry, options = self._entry, dict(self._options)
        self._backbone = load_backbone(backbone)
        self.backbone_name = self._backbone.name
        self._fingerprint_cache: str | None = None
        training = {name: options.pop(name) for name in list(options) if name in _TRAINING_FIELDS}
        if "width" in entry.type.Config.__dataclass_fields__:
            width = min(MAX_PROJECTION, 16 * self._backbone.vit.config.width)
            options = {"width": width, "blend": True, "balance": True, **options}
        config = make_config(entry.type.Config, entry.name, {**entry.options, **options})
        self._method = entry.type(self._backbone.vit, config).to(self._fabric.device)
        self._method.name = entry.name
        self._method.eval()
        pocket = self.backbone_name == "pocket"
        self._training = make_config(
            Training, "the training", {**(POCKET_TRAINING if pocket else {}), **training}
        )
        self._views = (
            Views(self._backbone.preprocessing, POCKET_AUGMENTATION, "squash")
            if pocket
            else Views(self._backbone.preprocessing)
        )
        self._set_tasks([])

    @property
    def _fingerprint(self) -> str:
        """Hash of the backbone's weights."""
        if self._fingerprint_cache is None:
            self._fingerprint_cache = self._backbone.vit.fingerprint()
        return self._fingerprint_cache

    def _set_tasks(self, tasks: list[TaskRecord]) -> None:
        """Set the lessons learned so far, and all that follows from them."""
        self._tasks = tasks
        self.classes_ = [name for task in tasks for name in task.new]
        """Class names, in the order in which they were learned."""
        fits = [(task.temperature, task.fitted_on) for task in tasks]
        self.temperature = calibration.merge_temperatures(fits, self._method.temperature)
        """Divides the logits before they become probabilities; fitted on held-out images."""
        self._predictor = Predictor(
            self._method,
            self._views.preprocessing,
            self._views.resize,
            self.classes_,
            self.temperature,
            self._fabric,
        )

    @property
    def tasks_(self) -> list[dict[str, Any]]:
        """One record for each lesson: date, classes, images, accuracy at the time."""
        return [task.model_dump() for task in self._tasks]

    @property
    def predictor(self) -> Predictor:
        """Classifies images with what has been learned so far.

        Raises:
            NotLearned: No class has been learned yet.
        """
        if not self._tasks:
            raise errors.NotLearned([], [])
        return self._predictor

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
        engine = self._engine(epochs, queries, stop, on_event)
        watched = None if watch is None else labelled(watch, part="test", skip_bad=skip_bad)
        warnings = self.warnings(images, watched)
        known = self.classes_
        previous = self._model() if known else None
        before, after = {}, {}
        checkpointer = None
        with restored_on_error(self._method):
            if watched is not None:
                before = self._watched_accuracies(watched, known, engine)
            task = self._make_task(images, validation)
            if progress is not None:
                checkpointer = self._open_checkpoints(progress, images, engine, validation)
            engine.learn(self._method, task, checkpointer=checkpointer)
            record = self._record(images, task, engine)
            if watched is not None:
                after = self._watched_accuracies(watched, known, engine)
        self._set_tasks([*self._tasks, record])
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
        if not self._auto or self._tasks:
            return None
        name, reason = advice.choose_backbone(images.samples)
        if name != self.backbone_name:
            self._build(name)
        return reason

    def warnings(self, images: Labelled, watched: Labelled | None = None) -> list[str]:
        """Return what a person should know before these images are learned."""
        known = self.classes_
        warnings = advice.warnings(images, known, self.backbone_name, self._views.preprocessing)
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
        self._set_state(previous, "the previous version")
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
        self, data: Any, *, top: int = 5, unknown_below: float = 0.0
    ) -> list[Prediction]:
        """Return the most likely classes of each image with their probabilities.

        Args:
            data: One or many paths, PIL images, arrays or tensors.
            top: Number of classes to name.
            unknown_below: An image is unknown if its most likely class is less likely than this.

        Example:
            ```python
            (prediction,) = classifier.predictions("image.jpg", unknown_below=0.5)
            print("unknown" if prediction.unknown else prediction.label, prediction.probability)
            ```
        """
        images = image_items(data)
        predictions = self.predictor.predict(images, top=top, unknown_below=unknown_below)
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
        skip_bad: bool = False,
        on_event: OnEvent | None = None,
    ) -> Evaluation:
        """Measure accuracy overall, for each class and for each lesson, among all known classes.

        Args:
            data: Labelled images, as for `learn`.
            labels: Class names, one for each image.
            skip_bad: Leave out images that cannot be read instead of failing.
            on_event: Called with the progress.

        Raises:
            BadImages: Images that cannot be read, without `skip_bad`.
            NotLearned: The images have classes that were not learned.
        """
        images = labelled(data, labels, part="test", skip_bad=skip_bad)
        classes, predictor = self.classes_, self.predictor
        not_learned = [name for name in images.names if name not in classes]
        if not_learned:
            raise errors.NotLearned(not_learned, classes)
        truth = _rows(images.names, classes)[images.split.labels]
        logits = predictor.split_logits(images.split, range(len(truth)), on_event=on_event)
        tasks = []
        for number, task in enumerate(self._tasks, 1):
            own = _rows(task.new, classes)
            inside = torch.isin(truth, own)
            if inside.any():
                accuracies = _accuracy(logits[inside], truth[inside], own)
                tasks.append(TaskAccuracy(number, tuple(task.new), int(inside.sum()), *accuracies))
        return Evaluation(
            images=len(truth),
            accuracy=float((logits.argmax(dim=1) == truth).double().mean()),
            calibration_error=calibration.expected_calibration_error(
                predictor.calibrated(logits), truth
            ),
            classes=_accuracy_by_class(images, range(len(truth)), logits.argmax(dim=1) == truth),
            tasks=tuple(tasks),
            left_out=tuple(str(problem) for problem in images.bad),
        )

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
        options = _checked_options(model.description, folder)
        method = _resolve_method(model.description, method, folder)
        backbone = _resolve_backbone(model.description.backbone, backbone, folder)
        classifier = cls(backbone, method, device=device, fabric=fabric, **options)
        classifier.backbone_name = model.description.backbone.name
        classifier._check_backbone(model.description, folder)
        classifier._set_state(model, folder)
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

        export_onnx(predictor, self._preprocessing(), Path(path))

    # -- steps of a lesson

    def _engine(
        self,
        epochs: int | None,
        queries: QueryMode | None,
        stop: Callable[[], bool],
        on_event: OnEvent | None,
    ) -> Engine:
        """Make the engine of one lesson, whose options replace those of the classifier."""
        if epochs is not None and self._method.closed_form:
            problem = f"{self.method_name} has nothing to train; leave it out"
            raise errors.BadOption("learn", "epochs", problem)
        training, options = self._training, {"epochs": epochs, "queries": queries}
        if changes := {name: value for name, value in options.items() if value is not None}:
            values = {**dataclasses.asdict(training), **changes}
            training = make_config(Training, "the training", values)
        on_event = on_event or (lambda event: None)
        return Engine(
            self._views, training, fabric=self._fabric, on_event=on_event, should_stop=stop
        )

    def _make_task(self, images: Labelled, validation: float) -> Task:
        """Number the classes as rows of the head and hold out a share of each class."""
        index, known = len(self._tasks), self.classes_
        names = [*known, *(name for name in images.names if name not in known)]
        rows = _rows(images.names, names).numpy()
        labels = rows[images.split.labels]
        held_out = np.zeros(len(labels), bool)
        generator = keyed_generator(self._training.seed, index, "held out")
        for row in rows:
            members = np.flatnonzero(labels == row)
            order = torch.randperm(len(members), generator=generator).numpy()
            if validation and len(members) >= MIN_IMAGES_TO_HOLD_OUT:
                count = max(1, round(validation * len(members)))
                count = min(count, len(members) - MIN_IMAGES_TO_TRAIN)
                held_out[members[order[:count]]] = True
        train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        return Task(
            index,
            tuple(sorted(rows.tolist())),
            Samples(images.split, train, labels[train]),
            Samples(images.split, test, labels[test]),
        )

    def _open_checkpoints(
        self, folder: Path, images: Labelled, engine: Engine, validation: float
    ) -> Checkpointer:
        """Open the checkpoints of a lesson, identified by everything that decides its result."""
        identity: dict[str, Any] = as_json(
            {
                "tasks": self.tasks_,
                "images": images.split.fingerprint(),
                "names": images.names,
                "validation": validation,
                "training": dataclasses.asdict(engine.training),
                "method": [self.method_name, dataclasses.asdict(self._method.config)],
                **({} if self._entry.sha256 is None else {"method_file": self._entry.sha256}),
                "backbone": self._fingerprint,
            }
        )
        checkpointer = Checkpointer(folder, identity, writes=self._fabric.global_rank == 0)
        other = checkpointer.other_training and checkpointer.other_training.identity
        if isinstance(other, dict) and other.get("tasks") == identity["tasks"]:
            raise errors.UnfinishedLesson(folder)
        return checkpointer

    def _record(self, images: Labelled, task: Task, engine: Engine) -> TaskRecord:
        """Describe the lesson, with accuracy and temperature measured on its held-out images."""
        known, temperature, fitted_on = self.classes_, self._method.temperature, 0
        accuracy, accuracy_own, error = None, None, None
        if len(task.test):
            labels, indices = torch.from_numpy(task.test.labels), task.test.indices.tolist()
            logits = self._predictor.split_logits(
                task.test.split, indices, stop=engine.should_stop, on_event=engine.on_event
            )
            if logits.shape[1] > 1:
                temperature = calibration.fit_temperature(logits, labels, temperature)
                fitted_on = len(labels)
            accuracy, accuracy_own = _accuracy(logits, labels, torch.tensor(task.classes))
            fits = [(each.temperature, each.fitted_on) for each in self._tasks]
            merged = calibration.merge_temperatures(
                [*fits, (temperature, fitted_on)], self._method.temperature
            )
            error = calibration.expected_calibration_error(
                torch.softmax(logits / merged, dim=1), labels
            )
        return TaskRecord(
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            new=[name for name in images.names if name not in known],
            continued=[name for name in images.names if name in known],
            images=images.counts(),
            held_out=len(task.test),
            accuracy=accuracy,
            accuracy_own=accuracy_own,
            calibration_error=error,
            temperature=temperature,
            fitted_on=fitted_on,
        )

    def _watched_accuracies(
        self, images: Labelled, names: list[str], engine: Engine
    ) -> dict[str, ClassAccuracy]:
        """Measure the accuracy of each of these classes that has watched images."""
        wanted = [row for row, name in enumerate(images.names) if name in names]
        indices = np.flatnonzero(np.isin(images.split.labels, wanted))
        if not len(indices):
            return {}
        truth = [images.names[label] for label in images.split.labels[indices]]
        logits = self._predictor.split_logits(
            images.split, indices.tolist(), stop=engine.should_stop, on_event=engine.on_event
        )
        correct = logits.argmax(dim=1) == _rows(truth, names)
        return _accuracy_by_class(images, indices, correct)

    # -- the state on disk

    def _model(self) -> store.Model:
        """Return the description and tensors to save."""
        if self._saved is not None:
            return self._saved
        state, path = self._method.learned_state(), self._backbone.path
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        description = Description(
            format=store.FORMAT,
            coda_prompt=__version__,
            method=self.method_name,
            method_sha256=self._entry.sha256,
            options=as_json(dataclasses.asdict(self._method.config)),
            training=as_json(dataclasses.asdict(self._training)),
            backbone=store.BackboneRecord(
                name=self.backbone_name,
                fingerprint=self._fingerprint,
                revision=self._backbone.revision,
                path=None if path is None else str(path.absolute()),
            ),
            pixels=self._preprocessing(),
            classes=self.classes_,
            tasks=self._tasks,
            temperature=self.temperature,
        )
        return store.Model(description, tensors)

    def _previous_model(self) -> store.Model | None:
        """Return the model before the newest task, unless another process has replaced it."""
        if isinstance(self._previous, Path):
            previous = store.read_previous(self._previous)
            follows = previous is not None and previous.description.tasks == self._tasks[:-1]
            self._previous = previous if follows else None
        return self._previous

    def _preprocessing(self) -> dict[str, Any]:
        fields: dict[str, Any] = as_json(dataclasses.asdict(self._views.preprocessing))
        return {**fields, "resize": self._views.resize}

    def _check_backbone(self, description: Description, path: object) -> None:
        if self._fingerprint != description.backbone.fingerprint:
            raise errors.BackboneMismatch(path, description.backbone.fingerprint, self._fingerprint)
        if self._backbone.path is not None:  # another version may recognise other files
            self._views = _as_recorded(self._views, description.pixels)
        if self._preprocessing() != description.pixels:
            raise errors.CorruptFile(path, "its preprocessing is not that of its backbone")

    def _set_state(self, model: store.Model, path: object) -> None:
        """Replace everything learned by what is in a model."""
        for tensor in model.tensors.values():
            negative_count = not tensor.is_floating_point() and bool((tensor < 0).any())
            if negative_count or not tensor.isfinite().all():
                raise errors.CorruptFile(
                    path, "it has numbers that cannot be: negative counts, NaN or inf"
                )
        self._method.load_learned_state(model.tensors)
        if self._method.classes_seen != len(model.description.classes):
            raise errors.CorruptFile(path, "its tensors are not of as many classes as it names")
        self._set_tasks(list(model.description.tasks))


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


_TRAINING_FIELDS = frozenset(field.name for field in dataclasses.fields(Training))
_RESERVED = _TRAINING_FIELDS | {"device", "fabric", "backbone", "method"}


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


def _checked_options(description: Description, path: object) -> dict[str, Any]:
    """Return the options of method and training that a model was made with."""
    if (
        not description.training.keys() <= _TRAINING_FIELDS
        or _RESERVED & description.options.keys()
    ):
        raise errors.CorruptFile(path, "its options are not those of a method and a training")
    # The number of loader processes depends on the machine, not on the model.
    return {**description.options, **description.training, "workers": 0}


def _resolve_backbone(made_with: store.BackboneRecord, named: str | None, folder: Path) -> str:
    """Return the backbone to load, after checking that the model may have been made with it.

    Whether it was is decided by the fingerprint of what is loaded.
    """
    known = made_with.name.partition("@")[0] in CATALOG
    if named not in (None, AUTO, made_with.name):
        entry, _, path = parse_backbone(str(named))
        if path is None or (entry is not None and entry.name != made_with.name.partition("@")[0]):
            problem = f"{folder} was made with {made_with.name}; make another model for {named}"
            raise errors.BadOption("the model", "backbone", problem)
        return f"{made_with.name}={path}" if known else str(path)
    if made_with.path is None or (not known and Path(made_with.name).exists()):
        return made_with.name
    if not Path(made_with.path).exists():
        remedy = "Name it where it is now: --backbone PATH (backbone=... in Python)."
        raise errors.MissingData(made_with.path, f"the backbone of {folder} is not there", remedy)
    return f"{made_with.name}={made_with.path}" if known else made_with.path


def check_backbone(made_with: store.BackboneRecord, named: str | None, folder: Path) -> None:
    """Check whether a backbone is the one a model was made with.

    Raises:
        BackboneMismatch: It is not.
    """
    fingerprint = load_backbone(_resolve_backbone(made_with, named, folder)).vit.fingerprint()
    if fingerprint != made_with.fingerprint:
        raise errors.BackboneMismatch(folder, made_with.fingerprint, fingerprint)


def _as_recorded(views: Views, pixels: dict[str, Any]) -> Views:
    """Return views with the normalisation a model was made with, if that is possible."""
    fields = {name: value for name, value in pixels.items() if name != "resize"}
    try:
        recorded = TypeAdapter(Preprocessing).validate_python(fields)
    except ValidationError:
        return views
    fits = len(recorded.mean) == len(recorded.std) == recorded.channels
    same = (recorded.size, recorded.channels) == (
        views.preprocessing.size,
        views.preprocessing.channels,
    )
    return dataclasses.replace(views, preprocessing=recorded) if fits and same else views


def _resolve_method(description: Description, named: str | None, folder: Path) -> str:
    """Return the method to construct, after checking that the model was made with it.

    A file is compared by its hash before anything in it runs.
    """
    made_with = description.method
    if description.method_sha256 is None:
        if made_with not in methods.METHODS:
            raise errors.CorruptFile(folder, f"its method '{made_with}' is not part of coda-prompt")
        if named not in (None, made_with):
            raise _other_method(made_with, str(named))
        return made_with
    if named is None:
        problem = (
            f"{folder} was made with the class {made_with} from a file of yours, and a model "
            f"contains no code; name the file with --method path/to/file.py:{made_with} "
            "(method=... in Python)"
        )
        raise errors.BadOption("the model", "method", problem)
    path, _, class_name = named.rpartition(":")
    if class_name != made_with:
        raise _other_method(made_with, named)
    if not Path(path).is_file():
        raise errors.BadMethod(named, f"there is no file {path}")
    if Path(path).resolve().is_relative_to(folder.resolve()):
        problem = f"{path} is inside the model folder, and no code from there is run; move it"
        raise errors.BadOption("the model", "method", problem)
    sha256 = file_sha256(Path(path))
    if sha256 != description.method_sha256:
        raise errors.HashMismatch(
            path,
            description.method_sha256,
            sha256,
            f"{folder} was made with another version of this file. Name that version, or learn a "
            "new model with this one.",
        )
    return named


def _other_method(made_with: str, named: str) -> errors.BadOption:
    problem = f"this model was made with {made_with}; make another model for {named}"
    return errors.BadOption("the model", "method", problem)


def _rows(names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return the position of each name in `classes`."""
    return torch.tensor([classes.index(name) for name in names], dtype=torch.int64)


def _accuracy(logits: Tensor, truth: Tensor, own: Tensor) -> tuple[float, float]:
    """Return the accuracy among all classes, and among the classes `own` only."""
    among_own = own[logits[:, own].argmax(dim=1)]
    correct = torch.stack([logits.argmax(dim=1) == truth, among_own == truth]).double()
    over_all, within = correct.mean(dim=1).tolist()
    return over_all, within


def _accuracy_by_class(
    images: Labelled, indices: Sequence[int] | NDArray[np.int64], correct: Tensor
) -> dict[str, ClassAccuracy]:
    """Return the accuracy of each class that has images among those at `indices`."""
    labels = torch.from_numpy(images.split.labels)[torch.as_tensor(indices)]
    accuracies = {}
    for row in labels.unique().tolist():
        members = correct[labels == row].double()
        accuracies[images.names[row]] = ClassAccuracy(len(members), float(members.mean()))
    return accuracies
