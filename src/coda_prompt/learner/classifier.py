"""A classifier that keeps learning: new classes, more images of old ones, no old image kept."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from coda_prompt import __version__, methods
from coda_prompt.data.images import Augmentation, eval_view, required_min_side
from coda_prompt.data.resolve import Labelled, labelled, unlabelled
from coda_prompt.data.sources import Split
from coda_prompt.data.stream import Samples, Task
from coda_prompt.errors import (
    BackboneMismatch,
    BadOption,
    CorruptFile,
    ModelChanged,
    NothingToUndo,
    NotLearned,
    UnfinishedLesson,
)
from coda_prompt.learner import advice, store
from coda_prompt.learner.calibration import (
    expected_calibration_error,
    fitted_temperature,
    merged_temperature,
    probabilities,
)
from coda_prompt.learner.results import ClassAccuracy, Evaluation, Learned, TaskAccuracy
from coda_prompt.learner.store import Description, TaskRecord
from coda_prompt.methods.options import make_config
from coda_prompt.model.catalog import LoadedBackbone, load_backbone
from coda_prompt.seeding import keyed_generator
from coda_prompt.storage.files import as_json
from coda_prompt.training.checkpointing import Checkpointer
from coda_prompt.training.devices import Devices, any_rank
from coda_prompt.training.engine import Engine
from coda_prompt.training.loading import Views
from coda_prompt.training.queries import QueryMode
from coda_prompt.training.settings import Event, Training
from coda_prompt.training.snapshot import Snapshot

DEFAULT_METHOD = "ranpac"
LARGEST_PROJECTION = 2048
"""Random features of RanPAC in a model: its statistics take 8 MB then, whatever the backbone."""
FEWEST_TO_HOLD_OUT, FEWEST_TO_TRAIN = 5, 2
POCKET_TRAINING = {"epochs": 10, "batch_size": 16, "learning_rate": 1e-2}
POCKET_AUGMENTATION = Augmentation(scale=(0.6, 1.0), ratio=(0.8, 1.25), flip=0.5)

OnEvent = Callable[[Event], None]


class ContinualClassifier:
    """Learns classes task after task on a frozen backbone. What it keeps are not images.

    `options` are those of the method (`coda methods NAME` lists them) and of the training
    (`epochs`, `batch_size`, `learning_rate`, `seed`, ...). `fabric`, already launched, says
    instead of `device` which devices share the work; every process makes the same calls then.
    """

    def __init__(
        self,
        backbone: str = "pocket",
        method: str = DEFAULT_METHOD,
        *,
        device: str = "auto",
        fabric: Fabric | None = None,
        **options: Any,
    ) -> None:
        _refuse_unfit(method)
        self.backbone_name, self.method_name = backbone, method
        self._fabric = fabric or Devices(device).fabric()
        self._backbone: LoadedBackbone = load_backbone(backbone)
        of_training = {name: options.pop(name) for name in list(options) if name in _TRAINING}
        if "width" in methods.find(method).type.Config.__dataclass_fields__:
            features = self._backbone.vit.config.width
            options.setdefault("width", min(LARGEST_PROJECTION, 16 * features))
            options.setdefault("blend", True)
            options.setdefault("balance", True)
        self._method = methods.make(method, self._backbone.vit, **options)
        pocket = POCKET_TRAINING if backbone == "pocket" else {}
        self._training: Training = make_config(Training, "the training", {**pocket, **of_training})
        self._views = (
            Views(self._backbone.preprocessing, POCKET_AUGMENTATION, "squash")
            if backbone == "pocket"
            else Views(self._backbone.preprocessing)
        )
        self._tasks: list[TaskRecord] = []
        self._current: store.Model | None = None
        """As it was read or written, where nothing has changed since."""
        self._previous: store.Model | Path | None = None
        """Before the newest task; a folder: to be read there when it is needed."""
        self._kept: Checkpointer | None = None
        """A training that is on disk until what it learned is saved."""
        self._home: tuple[Path, str | None] | None = None
        """The folder it was read from or saved to, and the hash of the model there."""

    @cached_property
    def _fingerprint(self) -> str:
        """Of the frozen backbone: a hash of all its weights, which takes its time."""
        return self._backbone.vit.fingerprint()

    @property
    def classes_(self) -> list[str]:
        """Names, in the order in which they were learned."""
        return [name for task in self._tasks for name in task.new]

    @property
    def tasks_(self) -> list[dict[str, Any]]:
        """What each `learn` brought: date, classes, images, accuracy at the time."""
        return [task.model_dump() for task in self._tasks]

    @property
    def shortest_side(self) -> int:
        """Preprocessing an image to be classified needs; a larger one is not seen more exactly."""
        return required_min_side(self._backbone.preprocessing, None)

    @property
    def temperature(self) -> float:
        """What scores are divided by before they become probabilities."""
        return self._merged(self._tasks)

    def _merged(self, tasks: list[TaskRecord]) -> float:
        fits = [(task.temperature, task.fitted_on) for task in tasks]
        return merged_temperature(fits, self._method.temperature)

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
        on_start: Callable[[Labelled, list[str]], None] | None = None,
    ) -> Learned:
        """Learn the classes of `data`, new ones and more images of known ones.

        `data` is a folder of class folders, `hub:owner/name`, a dataset of (image, label) pairs, or
        with `labels` paths, PIL images or arrays. `validation` is the share of each class held out
        to measure and to calibrate. `watch` are labelled images of classes known before, tested
        before and after: what the task made the model forget. `epochs` and `queries` are for this
        task alone. `progress` is a folder in which the training is kept: the same call goes on
        where one was stopped, by `stop` or by force, and `save` removes it.

        Where this fails or is interrupted, the classifier is as it was.
        """
        if not 0 <= validation < 1:
            raise BadOption("learn", "validation", f"{validation} is not in [0, 1)")
        if epochs is not None and self._method.closed_form:
            problem = f"{self.method_name} has nothing to train; leave it out"
            raise BadOption("learn", "epochs", problem)
        started = time.perf_counter()
        images = labelled(data, labels, skip_bad=skip_bad)
        watched = None if watch is None else labelled(watch, part="test", skip_bad=skip_bad)
        known = self.classes_
        found = advice.warnings(images, known, self.backbone_name, self._backbone.preprocessing)
        if watched is not None and not set(watched.names) & set(known):
            found.append("none of the watched classes was known before: nothing to forget yet")
        if on_start is not None:
            on_start(images, found)
        previous = self._model() if known else None
        before, records = Snapshot(self._method), list(self._tasks)
        watched_before = self._accuracy_by_class(watched, known, on_event)
        new = [name for name in images.names if name not in known]
        task = self._task(images, [*known, *new], validation)
        try:
            training = self._training_of(epochs=epochs, queries=queries)
            checkpointer = None
            if progress is not None:
                identity = self._identity(images, training, validation)
                first = self._fabric.global_rank == 0
                stop = any_rank(self._fabric, stop)
                checkpointer = Checkpointer(progress, identity, writes=first, stop=stop)
                held = checkpointer.other_training and checkpointer.other_training.identity
                if isinstance(held, dict) and held.get("tasks") == identity["tasks"]:
                    raise UnfinishedLesson(progress)
            self._engine(on_event, training).learn(self._method, task, checkpointer=checkpointer)
            record = self._record(images, new, len(task.test))
            self._tasks = [*records, record]
            if len(task.test):
                record = self._measured(record, task, on_event)
                self._tasks = [*records, record]
            watched_after = self._accuracy_by_class(watched, known, on_event)
        except BaseException:
            before.restore()
            self._tasks = records
            raise
        self._kept = checkpointer
        self._current, self._previous = None, previous
        return Learned(
            tuple(record.new),
            tuple(record.continued),
            record.images,
            record.held_out,
            record.accuracy,
            record.accuracy_own,
            record.calibration_error,
            time.perf_counter() - started,
            tuple(found),
            tuple(str(problem) for problem in images.bad),
            {
                name: (watched_before[name].accuracy, watched_after[name].accuracy)
                for name in watched_before
            },
        )

    def undo(self) -> None:
        """Back to the classifier before the newest task, bit for bit."""
        previous = self._past()
        if previous is None:
            raise NothingToUndo("The classifier")
        self._take(previous, "the previous version")
        self._current, self._previous = previous, None

    # -- predicting

    def predict(self, data: Any) -> NDArray[np.str_]:
        """The name of each image's class: one or many paths, PIL images or arrays."""
        chosen = self._logits(unlabelled(data)).argmax(dim=1).tolist()
        classes = self.classes_
        return np.array([classes[row] for row in chosen], dtype=str)

    def predict_proba(self, data: Any) -> NDArray[np.float64]:
        """N x classes, in the order of `classes_`; calibrated on held-out images."""
        scores = self._logits(unlabelled(data)).double()
        return probabilities(scores, self.temperature).numpy()

    def view(self, image: Image.Image) -> Tensor:
        """An image as `probabilities_of` takes it."""
        return eval_view(image, self._backbone.preprocessing, self._views.resize)

    def probabilities_of(self, views: Tensor) -> NDArray[np.float64]:
        """As `predict_proba`, of a batch of views: nothing but the passes, for a service."""
        if not self._tasks:
            raise NotLearned([], [])
        with torch.inference_mode():
            scores = self._method.logits(views.to(self._fabric.device)).float().cpu()
        return probabilities(scores.double(), self.temperature).numpy()

    def score(self, data: Any, labels: Any = None) -> float:
        """The share of images whose class is right."""
        return self.evaluate(data, labels).accuracy

    def evaluate(
        self,
        data: Any,
        labels: Any = None,
        *,
        skip_bad: bool = False,
        on_event: OnEvent | None = None,
    ) -> Evaluation:
        """Accuracy over all, of each class and of each task, among all classes known."""
        images = labelled(data, labels, part="test", skip_bad=skip_bad)
        classes = self.classes_
        unknown = [name for name in images.names if name not in classes]
        if unknown:
            raise NotLearned(unknown, classes)
        rows = _rows(images, classes)
        scores = self._logits(images.split, on_event=on_event)
        right = (scores.argmax(dim=1) == rows).double()
        tasks = []
        for number, task in enumerate(self._tasks):
            own = torch.tensor([classes.index(name) for name in task.new], dtype=torch.int64)
            inside = torch.isin(rows, own)
            if inside.any():
                among = own[scores[inside][:, own].argmax(dim=1)] == rows[inside]
                tasks.append(
                    TaskAccuracy(
                        number + 1,
                        tuple(task.new),
                        int(inside.sum()),
                        float(right[inside].mean()),
                        float(among.double().mean()),
                    )
                )
        calibrated = probabilities(scores.double(), self.temperature)
        return Evaluation(
            len(rows),
            float(right.mean()),
            expected_calibration_error(calibrated, rows),
            _by_class(images, right),
            tuple(tasks),
            tuple(str(problem) for problem in images.bad),
        )

    # -- keeping

    def save(self, folder: str | Path) -> None:
        """Write the model; whenever this stops, the folder holds one whole version.

        A model of another origin is replaced; one that others changed since this classifier was
        read from there is not.
        """
        place = Path(folder)
        with store.exclusive_writer(place):
            home = (place.resolve(), store.model_sha256(place))
            if self._home is not None and self._home[0] == home[0] and self._home != home:
                raise ModelChanged(place)
            self.write(place)

    def write(self, folder: Path) -> None:
        """As `save`, for one who holds the folder's lock already."""
        model = self._model()
        store.write_model(folder, model, self._past())
        self._current, self._home = model, (folder.resolve(), store.model_sha256(folder))
        if self._kept is not None:
            self._kept.remove()
            self._kept = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        backbone: str | None = None,
        device: str = "auto",
        fabric: Fabric | None = None,
    ) -> ContinualClassifier:
        """A saved model, on the backbone it was learned on. No code of the folder is run.

        `backbone` says where the weights are now, where the model was made with a file.
        """
        place = Path(folder)
        model = store.read_model(place)
        made = cls._made_as(model.description, place, backbone, device, fabric)
        made._take(model, place)
        made._current, made._previous = model, place
        made._home = (place.resolve(), store.model_sha256(place))
        return made

    def save_pretrained(self, folder: str | Path) -> None:
        """As `save`, in the layout of the hub: config.json, model.safetensors and a card."""
        self.save(folder)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        backbone: str | None = None,
        device: str = "auto",
        token: str | None = None,
        endpoint: str | None = None,
    ) -> ContinualClassifier:
        """From a folder or from the hub."""
        if Path(name).is_dir():
            return cls.load(name, backbone=backbone, device=device)
        from coda_prompt.learner.hub import download_model

        folder = download_model(str(name), revision, token, endpoint)
        return cls.load(folder, backbone=backbone, device=device)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload the model and its card; the address of the commit comes back."""
        from coda_prompt.learner.hub import upload_model

        return upload_model(name, self._model(), private=private, token=token, endpoint=endpoint)

    def export_onnx(self, path: str | Path) -> None:
        """Both passes in one graph, probabilities out, class names inside."""
        if not self._tasks:
            raise NotLearned([], [])
        from coda_prompt.learner.export import export_onnx

        export_onnx(self._method, self._model().description, Path(path))

    # -- a task

    def _identity(self, images: Labelled, training: Training, validation: float) -> Any:
        """Of a task's training: all that decides its bits."""
        return as_json(
            {
                "tasks": self.tasks_,
                "images": images.split.fingerprint(),
                "names": images.names,
                "validation": validation,
                "training": dataclasses.asdict(training),
                "method": [self.method_name, dataclasses.asdict(self._method.config)],
                "backbone": self._fingerprint,
            }
        )

    def _training_of(self, **given: Any) -> Training:
        changes = {name: value for name, value in given.items() if value is not None}
        held = dataclasses.asdict(self._training)
        return make_config(Training, "the training", {**held, **changes})

    def _record(self, images: Labelled, new: list[str], held_out: int) -> TaskRecord:
        """Of the task just learned, but for what is measured."""
        return TaskRecord(
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            new=new,
            continued=[name for name in images.names if name not in new],
            images=images.counts(),
            held_out=held_out,
            accuracy=None,
            accuracy_own=None,
            calibration_error=None,
            temperature=self._method.temperature,
            fitted_on=0,
        )

    def _task(self, images: Labelled, names: list[str], validation: float) -> Task:
        index = len(self._tasks)
        rows = np.array([names.index(name) for name in images.names], np.int64)
        labels = rows[images.split.labels]
        held = np.zeros(len(labels), bool)
        generator = keyed_generator(self._training.seed, index, "held out")
        for row in rows:
            own = np.flatnonzero(labels == row)
            order = torch.randperm(len(own), generator=generator).numpy()
            if validation and len(own) >= FEWEST_TO_HOLD_OUT:
                count = min(max(1, round(validation * len(own))), len(own) - FEWEST_TO_TRAIN)
                held[own[order[:count]]] = True
        kept, apart = np.flatnonzero(~held), np.flatnonzero(held)
        train = Samples(images.split, kept, labels[kept])
        test = Samples(images.split, apart, labels[apart])
        return Task(index, tuple(sorted(rows.tolist())), train, test)

    def _measured(self, record: TaskRecord, task: Task, on_event: OnEvent | None) -> TaskRecord:
        """The record with what the held-out images say."""
        scores = self._logits(task.test.split, task.test.indices, on_event)
        labels = torch.from_numpy(task.test.labels)
        own = torch.tensor(task.classes)
        among = own[scores[:, own].argmax(dim=1)]
        told: dict[str, Any] = {
            "accuracy": float((scores.argmax(dim=1) == labels).double().mean()),
            "accuracy_own": float((among == labels).double().mean()),
        }
        if scores.shape[1] > 1:
            usual = self._method.temperature
            told |= {"temperature": fitted_temperature(scores, labels, usual)}
            told |= {"fitted_on": len(labels)}
        measured = record.model_copy(update=told)
        temperature = self._merged([*self._tasks[:-1], measured])
        error = expected_calibration_error(probabilities(scores.double(), temperature), labels)
        return measured.model_copy(update={"calibration_error": error})

    def _accuracy_by_class(
        self, images: Labelled | None, classes: list[str], on_event: OnEvent | None
    ) -> dict[str, ClassAccuracy]:
        """Of watched images, those of these classes."""
        if images is None:
            return {}
        wanted = [place for place, name in enumerate(images.names) if name in classes]
        chosen = np.flatnonzero(np.isin(images.split.labels, wanted))
        if not len(chosen):
            return {}
        names = [images.names[label] for label in images.split.labels[chosen]]
        guessed = self._logits(images.split, chosen, on_event).argmax(dim=1).tolist()
        known = self.classes_
        found: dict[str, list[bool]] = {}
        for name, row in zip(names, guessed, strict=True):
            found.setdefault(name, []).append(known[row] == name)
        return {name: ClassAccuracy(len(own), float(np.mean(own))) for name, own in found.items()}

    def _logits(
        self,
        split: Split,
        chosen: NDArray[np.int64] | None = None,
        on_event: OnEvent | None = None,
    ) -> Tensor:
        if not self._tasks:
            raise NotLearned([], [])
        indices = np.arange(len(split)) if chosen is None else chosen
        if not len(indices):
            return torch.zeros(0, len(self.classes_))
        samples = Samples(split, indices, np.zeros(len(indices), np.int64))
        once = dataclasses.replace(self._training, queries="exact")  # each image is seen once
        return self._engine(on_event, once).logits(self._method, samples).float().cpu()

    def _engine(self, on_event: OnEvent | None, training: Training) -> Engine:
        told = {} if on_event is None else {"on_event": on_event}
        return Engine(self._views, training, fabric=self._fabric, **told)

    # -- a model

    def _model(self) -> store.Model:
        if self._current is not None:
            return self._current
        state = self._method.learned_state()
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        described = Description(
            format=store.FORMAT,
            coda_prompt=__version__,
            method=self.method_name,
            options=as_json(dataclasses.asdict(self._method.config)),
            training=as_json(dataclasses.asdict(self._training)),
            backbone=store.BackboneRecord(
                name=self.backbone_name,
                fingerprint=self._fingerprint,
                revision=self._backbone.revision,
            ),
            pixels=self._pixels(),
            classes=self.classes_,
            tasks=self._tasks,
            temperature=self.temperature,
        )
        return store.Model(described, tensors)

    def _pixels(self) -> dict[str, Any]:
        plain: dict[str, Any] = as_json(dataclasses.asdict(self._backbone.preprocessing))
        return {**plain, "resize": self._views.resize}

    def _past(self) -> store.Model | None:
        """The model before the newest task."""
        if isinstance(self._previous, Path):
            found = store.read_previous(self._previous)
            others = found is None or found.description.tasks != self._tasks[:-1]
            self._previous = None if others else found
        return self._previous

    @classmethod
    def _made_as(
        cls,
        description: Description,
        place: object,
        backbone: str | None,
        device: str,
        fabric: Fabric | None,
    ) -> ContinualClassifier:
        """An untaught classifier of this description."""
        if description.method not in methods.METHODS:
            raise CorruptFile(
                place, f"its method '{description.method}' does not come with this program"
            )
        if not description.training.keys() <= _TRAINING or {
            "device", "fabric", "backbone", "method", *_TRAINING
        } & description.options.keys():  # fmt: skip
            raise CorruptFile(place, "its options are not those of a method and a training")
        name = backbone or description.backbone.name
        # How many processes read images is this machine's affair, not that of a file.
        options = {**description.options, **description.training, "workers": 0}
        made = cls(name, description.method, device=device, fabric=fabric, **options)
        if backbone is not None:
            made.backbone_name = description.backbone.name
        found, expected = made._fingerprint, description.backbone.fingerprint
        if found != expected:
            raise BackboneMismatch(place, expected, found)
        if made._pixels() != description.pixels:
            raise CorruptFile(place, "it was learned with other pixels than its backbone has")
        return made

    def _take(self, model: store.Model, place: object) -> None:
        for tensor in model.tensors.values():
            counts = not tensor.is_floating_point()
            if not tensor.isfinite().all() or (counts and (tensor < 0).any()):
                raise CorruptFile(place, "it holds numbers that cannot be")
        self._method.load_learned_state(model.tensors)
        self._method.to(self._fabric.device).eval()
        if self._method.classes_seen != len(model.description.classes):
            raise CorruptFile(place, "it names more or fewer classes than it has learned")
        self._tasks = list(model.description.tasks)


_TRAINING = frozenset(field.name for field in dataclasses.fields(Training))


def _refuse_unfit(method: str) -> None:
    """Methods that need old images again, or whose file would be a whole network."""
    kind = methods.find(method).type
    if kind.keeps_images or kind.trains_on == "all":
        problem = f"{method} needs old images again, and this classifier keeps none"
    elif not kind.frozen_backbone:
        problem = f"{method} changes the whole network, and a model keeps only what is beside it"
    elif method not in methods.METHODS:
        problem = "a model is only made with a method that comes with the program"
    else:
        return
    raise BadOption("ContinualClassifier", "method", f"{problem}; take {DEFAULT_METHOD} or coda-p")


def _rows(images: Labelled, classes: list[str]) -> Tensor:
    """The row of each image's class."""
    rows = torch.tensor([classes.index(name) for name in images.names], dtype=torch.int64)
    return rows[torch.from_numpy(images.split.labels)]


def _by_class(images: Labelled, right: Tensor) -> dict[str, ClassAccuracy]:
    labels = torch.from_numpy(images.split.labels)
    found = {}
    for place, name in enumerate(images.names):
        own = labels == place
        found[name] = ClassAccuracy(int(own.sum()), float(right[own].mean()))
    return found
