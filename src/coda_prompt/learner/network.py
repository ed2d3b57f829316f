"""`Network`: a method on a frozen backbone, and the lessons it has learned."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from coda_prompt import __version__, errors
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.learner import calibration, duplicates, store
from coda_prompt.learner.duplicates import LearnedHashes
from coda_prompt.learner.predictor import Predictor
from coda_prompt.learner.store import Description, EditRecord, TaskRecord
from coda_prompt.learner.typicality import Prior
from coda_prompt.learner.unknown import PREFIX, UnknownDetector
from coda_prompt.research import methods
from coda_prompt.research.methods.additive import is_removable, removable_options
from coda_prompt.research.methods.closedform import ClosedForm
from coda_prompt.research.methods.options import make_config
from coda_prompt.research.training.augmentation import Augmentation
from coda_prompt.research.training.loading import Views
from coda_prompt.research.training.local import LocalDevice
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.catalog import LoadedBackbone, load_backbone
from coda_prompt.research.vit.vit import ViT
from coda_prompt.storage.files import as_json

if TYPE_CHECKING:
    from lightning_fabric import Fabric

MAX_PROJECTION = 2048
"""Random features of RanPAC in a model: limits its statistics to 8 MB for any backbone."""
MAX_SUM, MAX_COUNT = 1e16, 2**40
"""Largest numbers in a model: products of two sums are finite in float32, sums of counts exact."""
POCKET_TRAINING = {"epochs": 10, "batch_size": 16, "learning_rate": 1e-2}
PHOTO_TRAINING = {"micro_batch": 12}
"""Of `photo` on CPUs: larger passes are not faster there, and memory grows with them."""
POCKET_AUGMENTATION = Augmentation(scale=(0.6, 1.0), ratio=(0.8, 1.25), flip=0.5)


class Network:
    """A method on a frozen backbone, the lessons it has learned and the predictor they give.

    Args:
        backbone: A loaded backbone, or one to load as in `ContinualClassifier`, but not `auto`.
        entry: The method.
        options: Options of the method.
        training: Options of the training.
        fabric: The devices that share the work.
        stored_bytes: Size of the learned state that will be loaded; None: nothing will be.

    Raises:
        BadOption: An option has an unusable value, or needs more memory than is stored.
        UnknownName: There is no such backbone or option.
    """

    def __init__(
        self,
        backbone: str | LoadedBackbone,
        entry: methods.Entry,
        options: Mapping[str, Any],
        training: Mapping[str, Any],
        fabric: Fabric | LocalDevice,
        stored_bytes: int | None = None,
    ) -> None:
        self.entry = entry
        self.backbone = load_backbone(backbone) if isinstance(backbone, str) else backbone
        if isinstance(fabric, LocalDevice):
            fabric = fabric.for_backbone(self.backbone.vit)
        self.fabric = fabric
        self.backbone_name = self.backbone.name
        self.number, self.edits = 0, list[EditRecord]()
        """Number of the version, and what was edited."""
        options = removable_options(entry.type, options)
        fields = entry.type.Config.__dataclass_fields__
        if "blend" in fields:
            ridge = {"ridge": "relative"} if entry.type.closed_form else {}
            options = {"blend": True, "balance": True, **ridge, **options}
        if "width" in fields:
            width = min(MAX_PROJECTION, 16 * self.backbone.vit.config.width)
            options = {"width": width, **options}
        config = make_config(entry.type.Config, entry.name, {**entry.options, **options})
        if stored_bytes is not None and entry.sha256 is None:  # else its class is a user's own
            _check_size(entry, self.backbone.vit, config, stored_bytes)
        self.method = entry.type(self.backbone.vit, config).to(fabric.device)
        self.method.name = entry.name
        self.method.eval()
        self.prior = Prior.of(self.backbone)
        self.detector = self._new_detector()
        """Statistics to recognise unknown images."""
        self.hashes = LearnedHashes()
        pocket = self.backbone_name == "pocket"
        defaults: Mapping[str, Any] = POCKET_TRAINING if pocket else {}
        if self.backbone_name.partition("@")[0] == "photo" and fabric.device.type == "cpu":
            defaults = PHOTO_TRAINING
        self.training = make_config(Training, "the training", {**defaults, **training})
        self.views = (
            Views(self.backbone.preprocessing, POCKET_AUGMENTATION, "squash")
            if pocket
            else Views(self.backbone.preprocessing)
        )
        self.set_tasks([])

    def _new_detector(self) -> UnknownDetector:
        """Return a detector of unknown images that has learned nothing."""
        width = self.backbone.vit.config.width if self.prior is None else self.prior.width
        return UnknownDetector(width, is_removable(self.method), self.prior)

    @property
    def fingerprint(self) -> str:
        """Hash of the backbone's weights."""
        return self.backbone.fingerprint

    def set_tasks(self, tasks: list[TaskRecord], temperature: float | None = None) -> None:
        """Set the lessons learned so far, and all that follows from them.

        Args:
            tasks: The lessons.
            temperature: That of the probabilities; computed if it is not known.
        """
        self.tasks = tasks
        self.classes = [name for task in tasks for name in task.new]
        """Class names, in the order in which they were learned."""
        if temperature is None:
            fits = [(task.temperature, task.fitted_on) for task in tasks]
            temperature = self.fitted_temperature(fits, self.detector)
        self.temperature = temperature
        """Divides the logits before they become probabilities."""
        self.predictor = Predictor(
            self.method,
            self.views.preprocessing,
            self.views.resize,
            self.classes,
            self.temperature,
            self.fabric,
            self.detector,
        )

    def fitted_temperature(
        self, fits: Sequence[tuple[float, int]], detector: UnknownDetector
    ) -> float:
        """Compute the temperature of the probabilities from running statistics.

        Methods that do not classify plain features have the mean of their lessons' temperatures.

        Args:
            fits: The temperature fitted in each lesson and the number of images it was fitted on.
            detector: Has the statistics.
        """
        method, norm = self.method, self.backbone.vit.norm
        fits_queries = isinstance(method, ClosedForm) and method.closed_form
        if not (fits_queries and method.plain_queries):
            return calibration.merge_temperatures(fits, method.temperature)

        def scores(features: Tensor) -> Tensor:
            weight = next(norm.parameters())
            return method.scores(norm(features.to(weight))).cpu()

        width, moments = method.vit_config.width, detector.class_moments()
        covariance, freedom = moments.covariance()
        means, covariance = moments.means()[:, :width], covariance[:width, :width]
        with torch.inference_mode():
            return calibration.expected_temperature(
                scores, means, moments.counts.frozen, covariance, freedom, method.temperature
            )

    def preprocessing(self) -> dict[str, Any]:
        """Return what a model records of the preprocessing."""
        fields: dict[str, Any] = as_json(dataclasses.asdict(self.views.preprocessing))
        return {**fields, "resize": self.views.resize}

    def tensors(self) -> dict[str, Tensor]:
        """Copy everything learned."""
        state = self.method.learned_state() | self.detector.state() | self.hashes.state()
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def copied(self) -> Network:
        """Return a network on the same backbone that has learned the same."""
        memo = {id(part): part for part in (self.method.backbone, self.fabric)}
        other = copy.copy(self)
        other.method = copy.deepcopy(self.method, memo)
        other.detector, other.hashes = copy.deepcopy((self.detector, self.hashes))
        other.number, other.edits = 0, []
        other.set_tasks(list(self.tasks), self.temperature)
        return other

    def to_model(self, parent: int | None = None) -> store.Model:
        """Return the description and tensors to save; `parent` is the version before.

        Raises:
            CorruptFile: The model would be refused when it is read.
        """
        path = self.backbone.path
        fields = dict(
            format=store.FORMAT,
            coda_prompt=__version__,
            method=self.entry.name,
            method_sha256=self.entry.sha256,
            options=as_json(dataclasses.asdict(self.method.config)),
            training=as_json(dataclasses.asdict(self.training)),
            backbone=dict(
                name=self.backbone_name,
                fingerprint=self.fingerprint,
                revision=self.backbone.revision,
                path=None if path is None else str(path.absolute()),
            ),
            pixels=self.preprocessing(),
            classes=self.classes,
            tasks=[task.model_dump(mode="json") for task in self.tasks],
            temperature=self.temperature,
            number=self.number,
            parent=parent,
            edits=[edit.model_dump(mode="json") for edit in self.edits],
        )
        description = store.checked_description(fields, "The new version")
        return store.Model(description, self.tensors())

    def check_backbone(self, description: Description, path: object) -> None:
        """Check that a model was made with this backbone, and take over its normalisation.

        Raises:
            BackboneMismatch: It was made with another backbone.
            CorruptFile: Its preprocessing is not that of its backbone.
        """
        if self.fingerprint != description.backbone.fingerprint:
            raise errors.BackboneMismatch(path, description.backbone.fingerprint, self.fingerprint)
        if self.backbone.path is not None:  # another version may recognise other files
            self.views = _as_recorded(self.views, description.pixels)
        if self.preprocessing() != description.pixels:
            raise errors.CorruptFile(path, "its preprocessing is not that of its backbone")

    def set_state(self, model: store.Model, path: object) -> None:
        """Replace everything learned by what is in a model.

        Raises:
            CorruptFile: The tensors do not fit the description.
        """
        check_values(model.tensors, path)
        learned = dict(model.tensors)
        statistics, seen = (
            {name: learned.pop(name) for name in model.tensors if name.startswith(prefix)}
            for prefix in (PREFIX, duplicates.PREFIX)
        )
        self.method.load_learned_state(learned)
        if self.method.classes_seen != len(model.description.classes):
            raise errors.CorruptFile(path, "its tensors are not of as many classes as it names")
        detector, hashes = self._new_detector(), LearnedHashes()
        if not detector.load(statistics, self.method.classes_seen):
            problem = "its statistics of unknown images do not fit its classes and backbone"
            raise errors.CorruptFile(path, problem)
        if seen and not hashes.load(seen, self.method.classes_seen):
            raise errors.CorruptFile(path, "its hashes of images do not fit its classes")
        self.detector, self.hashes = detector, hashes
        self.number, self.edits = model.number, list(model.description.edits)
        self.set_tasks(list(model.description.tasks), model.description.temperature)


def check_values(tensors: Mapping[str, Tensor], path: object) -> None:
    """Check that numbers of a model can be calculated with.

    Raises:
        CorruptFile: There are NaN, infinite, huge or, among counts, negative ones.
    """
    for tensor in tensors.values():
        # As Python numbers: beside a tensor of bytes, MAX_COUNT would become a byte too.
        low, high = (each.item() for each in tensor.aminmax()) if tensor.numel() else (0, 0)
        least, most = (-MAX_SUM, MAX_SUM) if tensor.is_floating_point() else (0, MAX_COUNT)
        if not (low >= least and high <= most):  # also if one of them is NaN
            raise errors.CorruptFile(path, "it has invalid values: NaN, inf, huge or negative ones")


def _check_size(entry: methods.Entry, vit: ViT, config: Any, stored_bytes: int) -> None:
    """Refuse options with which a method is larger than its stored state, without allocating it.

    Raises:
        BadOption: It is larger.
    """
    with torch.device("meta"):
        state = entry.type(vit, config).learned_state()
    if sum(tensor.nbytes for tensor in state.values()) > stored_bytes:
        raise errors.BadOption("the model", "options", "they need larger tensors than it has")


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
