"""A classifier that keeps learning: new classes, more images of old ones, no old image kept."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from torch import Tensor

from coda_prompt import __version__, methods
from coda_prompt.data.images import Augmentation
from coda_prompt.data.sources import Split
from coda_prompt.data.stream import Samples, Task
from coda_prompt.errors import BadOption, CorruptFile, NothingToUndo, NotTaught, WrongBackbone
from coda_prompt.learner import advice, store
from coda_prompt.learner.calibration import (
    expected_calibration_error,
    fitted_temperature,
    merged_temperature,
    probabilities,
)
from coda_prompt.learner.card import card_of
from coda_prompt.learner.inputs import Labelled, labelled, unlabelled
from coda_prompt.methods.options import make_config
from coda_prompt.model.catalog import LoadedBackbone, load_backbone
from coda_prompt.seeding import keyed_generator
from coda_prompt.training.engine import Engine
from coda_prompt.training.loading import Views
from coda_prompt.training.settings import Event, Training

DEFAULT_METHOD = "ranpac"
LARGEST_PROJECTION = 2048
"""Random features of RanPAC in a model: its statistics take 8 MB then, whatever the backbone."""
FEWEST_TO_HOLD_OUT = 5
POCKET_TRAINING = {"epochs": 10, "batch_size": 16, "learning_rate": 1e-2}
POCKET_AUGMENTATION = Augmentation(scale=(0.6, 1.0), ratio=(0.8, 1.25), flip=0.5)


@dataclass(frozen=True)
class Learned:
    """What one `learn` did."""

    new: tuple[str, ...]
    continued: tuple[str, ...]
    """Classes that were known before and got more images."""
    images: dict[str, int]
    """Of each class, held-out ones included."""
    held_out: int
    accuracy: float | None
    """On held-out images of this task, among all classes known; None where none were held out."""
    accuracy_own: float | None
    """The same among the classes of this task."""
    calibration_error: float | None
    seconds: float
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Files that could not be read."""
    forgotten: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of classes of the folder to watch: accuracy before and after."""


@dataclass(frozen=True)
class ClassAccuracy:
    images: int
    accuracy: float


@dataclass(frozen=True)
class TaskAccuracy:
    classes: tuple[str, ...]
    images: int
    accuracy: float
    """Among all classes known."""
    accuracy_own: float
    """Among the task's own classes."""


@dataclass(frozen=True)
class Evaluation:
    images: int
    accuracy: float
    calibration_error: float
    classes: dict[str, ClassAccuracy]
    tasks: tuple[TaskAccuracy, ...]
    """Tasks of which at least one class was tested."""


class ContinualClassifier:
    """Learns classes task after task on a frozen backbone. What it keeps are not images.

    `options` are those of the method (`coda methods NAME` lists them) and of the training
    (`epochs`, `batch_size`, `learning_rate`, `seed`, ...).
    """

    def __init__(
        self,
        backbone: str = "pocket",
        method: str = DEFAULT_METHOD,
        *,
        device: str = "auto",
        **options: Any,
    ) -> None:
        kind = methods.find(method).type
        if kind.keeps_images or kind.trains_on == "all":
            raise BadOption(
                "ContinualClassifier",
                "method",
                f"{method} needs old images again, and this classifier keeps none; take "
                f"{DEFAULT_METHOD} or coda-p",
            )
        self.backbone_name, self.method_name = backbone, method
        self._backbone: LoadedBackbone = load_backbone(backbone)
        of_training = {name: options.pop(name) for name in list(options) if name in _TRAINING}
        if "width" in kind.Config.__dataclass_fields__:
            features = self._backbone.vit.config.width
            options.setdefault("width", min(LARGEST_PROJECTION, 16 * features))
        self._method = methods.make(method, self._backbone.vit, **options)
        pocket = POCKET_TRAINING if backbone == "pocket" else {}
        self._training = make_config(
            Training, "the training", {"queries": "cached", **pocket, **of_training}
        )
        self._views = (
            Views(self._backbone.pixels, POCKET_AUGMENTATION, "squash")
            if backbone == "pocket"
            else Views(self._backbone.pixels)
        )
        self._fabric = Fabric(accelerator=device, devices=1)
        self._previous: store.Model | None = None
        self.classes_: list[str] = []
        """Names, in the order in which they were learned."""
        self.tasks_: list[dict[str, Any]] = []
        """What each `learn` brought: date, classes, images, accuracy at the time."""

    # -- learning

    def learn(
        self,
        data: Any,
        labels: Any = None,
        *,
        validation: float = 0.2,
        watch: Any = None,
        skip_bad: bool = False,
        on_event: Callable[[Event], None] | None = None,
        on_start: Callable[[Labelled, list[str]], None] | None = None,
    ) -> Learned:
        """Learn the classes of `data`, new ones and more images of known ones.

        `data` is a folder of class folders, `hub:owner/name`, a dataset of (image, label) pairs, or
        with `labels` paths, PIL images or arrays. `validation` is the share of each class held out
        to measure and to calibrate. `watch` are labelled images of classes known before, tested
        before and after: what the task made the model forget.

        Where this fails or is interrupted, the classifier is as it was.
        """
        if not 0 <= validation < 1:
            raise BadOption("learn", "validation", f"{validation} is not in [0, 1)")
        started = time.perf_counter()
        images = labelled(data, labels, skip_bad=skip_bad)
        watched = None if watch is None else labelled(watch, skip_bad=skip_bad)
        found = advice.warnings(images, self.classes_, self.backbone_name, self._backbone.pixels)
        if on_start is not None:
            on_start(images, found)
        before = self._accuracy_by_class(watched) if watched is not None and self.classes_ else {}
        names = [*self.classes_, *(name for name in images.names if name not in self.classes_)]
        task, held_out = self._task(images, names, validation)
        previous = self._model() if self.classes_ else None
        engine = self._engine(on_event)
        engine.learn(self._method, task)
        new = tuple(names[len(self.classes_) :])
        continued = tuple(name for name in images.names if name not in new)
        self.classes_ = names
        measured = self._measured(engine, task, held_out)
        counts = images.counts()
        self.tasks_.append(
            {
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "new": list(new),
                "continued": list(continued),
                "images": counts,
                **measured,
            }
        )
        self._previous = previous
        after = self._accuracy_by_class(watched) if watched is not None else {}
        return Learned(
            new,
            continued,
            counts,
            len(held_out),
            measured["accuracy"],
            measured["accuracy_own"],
            measured["calibration_error"],
            time.perf_counter() - started,
            tuple(found),
            tuple(str(problem) for problem in images.bad),
            {name: (before[name].accuracy, after[name].accuracy) for name in before},
        )

    def undo(self) -> None:
        """Back to the classifier before the newest task, bit for bit."""
        if self._previous is None:
            raise NothingToUndo("The classifier")
        self._take(self._previous, "the previous version")
        self._previous = None

    # -- predicting

    def predict(self, data: Any) -> NDArray[np.str_]:
        """The name of each image's class: one or many paths, PIL images or arrays."""
        chosen = self._logits(unlabelled(data)).argmax(dim=1).tolist()
        return np.array([self.classes_[row] for row in chosen], dtype=str)

    def predict_proba(self, data: Any) -> NDArray[np.float64]:
        """N x classes, in the order of `classes_`; calibrated on held-out images."""
        scores = self._logits(unlabelled(data)).double()
        return probabilities(scores, self.temperature).numpy()

    def score(self, data: Any, labels: Any = None) -> float:
        """The share of images whose class is right."""
        return self.evaluate(data, labels).accuracy

    def evaluate(self, data: Any, labels: Any = None) -> Evaluation:
        """Accuracy over all, of each class and of each task, among all classes known."""
        images = labelled(data, labels)
        unknown = [name for name in images.names if name not in self.classes_]
        if unknown:
            raise NotTaught(unknown, self.classes_)
        rows = torch.tensor([self.classes_.index(name) for name in images.names])
        rows = rows[torch.from_numpy(images.split.labels)]
        scores = self._logits(images.split)
        chosen = scores.argmax(dim=1)
        right = (chosen == rows).double()
        tasks = []
        for task in self.tasks_:
            own = torch.tensor(
                [self.classes_.index(name) for name in task["new"]], dtype=torch.long
            )
            inside = torch.isin(rows, own)
            if inside.any():
                among = own[scores[inside][:, own].argmax(dim=1)] == rows[inside]
                accuracy = float(right[inside].mean())
                count = int(inside.sum())
                tasks.append(
                    TaskAccuracy(tuple(task["new"]), count, accuracy, float(among.double().mean()))
                )
        calibrated = probabilities(scores.double(), self.temperature)
        return Evaluation(
            len(rows),
            float(right.mean()),
            expected_calibration_error(calibrated, rows),
            {
                name: ClassAccuracy(int(own.sum()), float(right[own].mean()))
                for name in images.names
                if (own := rows == self.classes_.index(name)).any()
            },
            tuple(tasks),
        )

    @property
    def temperature(self) -> float:
        """What scores are divided by before they become probabilities."""
        return merged_temperature(
            [(task["temperature"], task["held_out"]) for task in self.tasks_ if task["held_out"]]
        )

    # -- keeping

    def save(self, folder: str | Path) -> None:
        """Write the model; whenever this stops, the folder holds one whole version."""
        with store.writing(Path(folder)):
            self.write(Path(folder))

    def write(self, folder: Path) -> None:
        """As `save`, for one who holds the folder's lock already."""
        store.write_model(folder, self._model(), self._previous, card_of(self._describe()))

    def set_training(self, **options: Any) -> None:
        """How the next tasks are trained: `epochs`, `learning_rate`, ..."""
        held = dataclasses.asdict(self._training)
        self._training = make_config(Training, "the training", {**held, **options})

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> ContinualClassifier:
        """A saved model, on the backbone it was learned on. No code of the folder is run."""
        place = Path(folder)
        model = store.read_model(place)
        made = cls._from_description(model.description, place, device)
        made._take(model, place)
        previous = store.read_previous(place)
        made._previous = previous if previous and previous.version < model.version else None
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
        device: str = "auto",
        endpoint: str | None = None,
    ) -> ContinualClassifier:
        """From a folder or from the hub."""
        if Path(name).is_dir():
            return cls.load(name, device=device)
        from coda_prompt.learner.sharing import fetched

        return cls.load(fetched(str(name), revision, endpoint), device=device)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload the model and its card; the address of the commit comes back."""
        from coda_prompt.learner.sharing import pushed

        card = card_of(self._describe())
        return pushed(name, self._model(), card, private=private, token=token, endpoint=endpoint)

    def export_onnx(self, path: str | Path) -> None:
        """Both passes in one graph, probabilities out, class names inside."""
        if not self.classes_:
            raise NotTaught([], [])
        from coda_prompt.learner.export import export_onnx

        export_onnx(self._method, self.temperature, self._describe(), Path(path))

    def description(self) -> dict[str, Any]:
        """All that is known of the model but its tensors."""
        return self._describe()

    # -- inner parts

    def _task(self, images: Labelled, names: list[str], validation: float) -> tuple[Task, Samples]:
        rows = np.array([names.index(name) for name in images.names], np.int64)
        labels = rows[images.split.labels]
        held = np.zeros(len(labels), bool)
        generator = keyed_generator(self._training.seed, len(self.tasks_), "held out")
        for row in rows:
            own = np.flatnonzero(labels == row)
            order = torch.randperm(len(own), generator=generator).numpy()
            if validation and len(own) >= FEWEST_TO_HOLD_OUT:
                held[own[order[: max(1, round(validation * len(own)))]]] = True
        kept, apart = np.flatnonzero(~held), np.flatnonzero(held)
        train = Samples(images.split, kept, labels[kept])
        test = Samples(images.split, apart, labels[apart])
        return Task(len(self.tasks_), tuple(sorted(rows.tolist())), train, test), test

    def _measured(self, engine: Engine, task: Task, held_out: Samples) -> dict[str, Any]:
        nothing = {"accuracy": None, "accuracy_own": None, "calibration_error": None}
        if not len(held_out):
            return {**nothing, "held_out": 0, "temperature": 1.0}
        scores = engine.logits(self._method, held_out).cpu()
        labels = torch.from_numpy(held_out.labels)
        own = torch.tensor(task.classes)
        among = own[scores[:, own].argmax(dim=1)]
        temperature = fitted_temperature(scores, labels) if scores.shape[1] > 1 else 1.0
        calibrated = probabilities(scores.double(), temperature)
        return {
            "accuracy": float((scores.argmax(dim=1) == labels).double().mean()),
            "accuracy_own": float((among == labels).double().mean()),
            "calibration_error": expected_calibration_error(calibrated, labels),
            "held_out": len(held_out),
            "temperature": temperature,
        }

    def _accuracy_by_class(self, images: Labelled | None) -> dict[str, ClassAccuracy]:
        """Of the classes known now."""
        if images is None:
            return {}
        known = [place for place, name in enumerate(images.names) if name in self.classes_]
        rows = np.array([self.classes_.index(images.names[place]) for place in known], np.int64)
        chosen = np.flatnonzero(np.isin(images.split.labels, known))
        if not len(chosen):
            return {}
        scores = self._logits(images.split, chosen).argmax(dim=1).numpy()
        found = {}
        for place, row in zip(known, rows, strict=True):
            own = images.split.labels[chosen] == place
            right = float((scores[own] == row).mean())
            found[images.names[place]] = ClassAccuracy(int(own.sum()), right)
        return found

    def _logits(self, split: Split, chosen: NDArray[np.int64] | None = None) -> Tensor:
        if not self.classes_:
            raise NotTaught([], [])
        indices = np.arange(len(split)) if chosen is None else chosen
        if not len(indices):
            return torch.zeros(0, len(self.classes_))
        samples = Samples(split, indices, np.zeros(len(indices), np.int64))
        return self._engine(None).logits(self._method, samples).float().cpu()

    def _engine(self, on_event: Callable[[Event], None] | None) -> Engine:
        told = {} if on_event is None else {"on_event": on_event}
        return Engine(self._views, self._training, fabric=self._fabric, **told)

    def _model(self) -> store.Model:
        tensors = {
            name: tensor.detach().cpu().clone()
            for name, tensor in self._method.learned_state().items()
        }
        return store.Model(self._describe(), tensors)

    def _describe(self) -> dict[str, Any]:
        return {
            "coda_prompt": __version__,
            "version": len(self.tasks_),
            "method": self.method_name,
            "options": dataclasses.asdict(self._method.config),
            "training": dataclasses.asdict(self._training),
            "backbone": {
                "name": self.backbone_name,
                "fingerprint": self._backbone.vit.fingerprint(),
                "revision": self._backbone.revision,
            },
            "pixels": {
                **dataclasses.asdict(self._backbone.pixels),
                "resize": self._views.resize,
            },
            "temperature": self.temperature,
            "classes": list(self.classes_),
            "tasks": [dict(task) for task in self.tasks_],
        }

    @classmethod
    def _from_description(
        cls, description: dict[str, Any], place: object, device: str
    ) -> ContinualClassifier:
        method = store.text_field(description, "method", place)
        backbone, options = description.get("backbone"), description.get("options")
        training = description.get("training")
        if not (
            isinstance(backbone, dict) and isinstance(options, dict) and isinstance(training, dict)
        ):
            raise CorruptFile(place, "its description is not complete")
        if method not in methods.METHODS:
            raise BadOption(
                str(place), "method", f"'{method}' does not come with this program, and no other "
                "code is run for a model"
            )  # fmt: skip
        name = store.text_field(backbone, "name", place)
        made = cls(name, method, device=device, **options, **training)
        found = made._backbone.vit.fingerprint()
        expected = store.text_field(backbone, "fingerprint", place)
        if found != expected:
            raise WrongBackbone(place, expected, found)
        return made

    def _take(self, model: store.Model, place: object) -> None:
        classes, tasks = model.description.get("classes"), model.description.get("tasks")
        if (
            not isinstance(classes, list)
            or not isinstance(tasks, list)
            or not all(isinstance(name, str) for name in classes)
            or len(set(classes)) < len(classes)
        ):
            raise CorruptFile(place, "its description has no list of classes and tasks")
        self._method.load_learned_state(model.tensors)
        if self._method.classes_seen != len(classes):
            raise CorruptFile(place, "it names more or fewer classes than it has learned")
        self.classes_, self.tasks_ = list(classes), [dict(task) for task in tasks]


_TRAINING = frozenset(field.name for field in dataclasses.fields(Training))
