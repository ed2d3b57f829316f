"""`LearnedModel`: everything a classifier has learned, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError
from numpy.typing import NDArray

from coda_prompt import __version__
from coda_prompt.encoder.encoder import Encoder, Prompts
from coda_prompt.errors import BackboneMismatch, CorruptFile, UnknownName
from coda_prompt.learner.hashes import LearnedHashes
from coda_prompt.learner.records import (
    FORMAT,
    BackboneRecord,
    Description,
    EditRecord,
    Options,
    TaskRecord,
    checked_description,
)
from coda_prompt.statistics import calibration
from coda_prompt.statistics.classifier import OPTIONS, Classifier
from coda_prompt.statistics.typicality import Prior, UnknownScorer
from coda_prompt.statistics.unknown import UnknownDetector
from coda_prompt.storage.files import as_json

Arrays = Mapping[str, NDArray[Any]]

AUTO = "auto"
DEFAULT_METHODS = MappingProxyType({"drawing": "ranpac", "photograph": "slda"})
"""By what an encoder is for; docs/lab/encoders.md has the measurements."""
CLASSIFIERS: Mapping[str, str | None] = MappingProxyType(
    {**{name: name for name in OPTIONS}, "coda-p-ranpac": "ranpac", "coda-p": None}
)
"""Method -> its closed-form classifier; None: a linear head, trained with the prompts."""
PROMPTED = frozenset({"coda-p", "coda-p-ranpac"})
"""Methods that train prompts: in every lesson, and in the first one."""
MAX_SUM, MAX_COUNT = 1e16, 2**40
"""Largest numbers in a model: products of two sums are finite in float32, sums of counts exact."""
CONTRADICTION = "its statistics contradict each other"


@dataclass(frozen=True, eq=False)
class LinearHead:
    """The head that was trained with the prompts of `coda-p`."""

    weight: NDArray[np.float32]
    """Classes x D."""
    bias: NDArray[np.float32]

    temperature = 1.0

    def scores(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Compute the scores of features, N x classes."""
        return (features @ self.weight.T + self.bias).astype(np.float64)

    def distances(self, features: NDArray[np.floating]) -> None:
        """There are no class means to be near to."""


@dataclass(frozen=True, eq=False)
class LearnedModel:
    """What lessons and edits have made: a value, which they replace by another one.

    It has neither the encoder nor any image. `encoder` is what its features come from.
    """

    method: str
    """A name in `CLASSIFIERS`."""
    options: Options
    encoder: Encoder
    backbone: BackboneRecord
    """How the encoder is named and recognised."""
    classifier: Classifier | LinearHead
    detector: UnknownDetector
    hashes: LearnedHashes = field(default_factory=LearnedHashes)
    trained: Arrays = field(default_factory=dict)
    """What was trained: prompts and their keys, and with `coda-p` the head."""
    tasks: tuple[TaskRecord, ...] = ()
    """The lessons."""
    edits: tuple[EditRecord, ...] = ()
    temperature: float = 1.0
    """Divides the scores before they become probabilities."""
    number: int = 0
    """Number of the version."""
    parent: int | None = None
    """Number of the version this one was made from."""

    @classmethod
    def empty(cls, encoder: Encoder, method: str, options: Options) -> LearnedModel:
        """Return a model that has learned nothing.

        Raises:
            UnknownName: There is no such method.
        """
        method = DEFAULT_METHODS[encoder.kind] if method == AUTO else method
        backbone = BackboneRecord(
            name=encoder.name,
            fingerprint=encoder.fingerprint,
            kind=encoder.kind,
            revision=encoder.revision,
            path=None if encoder.path is None else str(encoder.path.absolute()),
        )
        classifier = _empty_classifier(method, encoder, options)
        detector = UnknownDetector.empty(encoder.plain_width, options.removable, _prior(encoder))
        return cls(method, options, encoder, backbone, classifier, detector)

    @cached_property
    def classes(self) -> list[str]:
        """Class names, in the order in which they were learned."""
        return [name for task in self.tasks for name in task.new]

    @property
    def labels(self) -> list[Any]:
        """The classes as they were given: integers, if all of them were and are."""
        names = self.classes
        integers = self.options.integers and all(str(_integer(name)) == name for name in names)
        return [int(name) for name in names] if integers else list(names)

    @property
    def additive(self) -> bool:
        """Whether what was learned are sums over images, so that classes can be edited."""
        return isinstance(self.classifier, Classifier)

    # -- answers

    @cached_property
    def prompts(self) -> Prompts | None:
        """The inputs of the prompted encoder; None without prompts."""
        if not self.trained:
            return None
        return Prompts(*(self.trained[f"{name}.frozen"] for name in PROMPT_NAMES))

    @cached_property
    def scorer(self) -> UnknownScorer:
        """Computes how typical images are of the learned classes.

        Raises:
            CorruptFile: The statistics contradict each other.
        """
        try:
            return self.detector.scorer()
        except LinAlgError as error:
            raise CorruptFile("The model", CONTRADICTION) from error

    def scores(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the scores of features, N x classes.

        Raises:
            CorruptFile: The model has numbers that no lesson gives.
        """
        scores = self.classifier.scores(features)
        if np.isnan(scores).any() or (scores == np.inf).any():
            raise CorruptFile("The model", "its scores of an image are not finite")
        return scores

    def probabilities(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return calibrated probabilities for scores, N x classes."""
        scaled = scores / self.temperature
        powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        result: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return result

    # -- other values

    def calibrated(self) -> LearnedModel:
        """Return the model with the temperature that follows from its statistics and lessons.

        Prompts change the features of which there are statistics; methods that have them use the
        mean of the temperatures fitted on held-out images.
        """
        default = self.classifier.temperature
        fits = [(task.temperature, task.fitted_on) for task in self.tasks]
        if self.method in PROMPTED:
            return replace(self, temperature=calibration.merge_temperatures(fits, default))
        return replace(self, temperature=default)

    def with_lessons(
        self, tasks: Sequence[TaskRecord], edit: EditRecord | None = None
    ) -> LearnedModel:
        """Return the model with other records of lessons, calibrated again."""
        edits = self.edits if edit is None else (*self.edits, edit)
        return replace(self, tasks=tuple(tasks), edits=edits).calibrated()

    # -- the content of a file

    def description(self) -> Description:
        """Return everything but the arrays.

        Raises:
            CorruptFile: The model would be refused when it is read.
        """
        fields = dict(
            format=FORMAT,
            coda_prompt=__version__,
            method=self.method,
            options=self.options.model_dump(mode="json"),
            backbone=self.backbone.model_dump(mode="json"),
            classes=self.classes,
            tasks=[task.model_dump(mode="json") for task in self.tasks],
            temperature=self.temperature,
            number=self.number,
            parent=self.parent,
            edits=[edit.model_dump(mode="json") for edit in self.edits],
        )
        return checked_description(as_json(fields), "The new version")

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays by their names in the file."""
        parts = {"unknown": self.detector.arrays(), "duplicates": self.hashes.arrays()}
        if isinstance(self.classifier, Classifier):
            shared = _shared_arrays(self.classifier, self.method, self.encoder)
            own = self.classifier.arrays().items()
            parts["classifier"] = {name: array for name, array in own if name not in shared}
        parts["trained"] = dict(self.trained)
        return {
            f"{part}.{name}": array
            for part, arrays in parts.items()
            for name, array in arrays.items()
        }

    @classmethod
    def of_file(
        cls, description: Description, arrays: Arrays, encoder: Encoder, path: object
    ) -> LearnedModel:
        """Return the model in a file, which is not trusted.

        Raises:
            BackboneMismatch: It was made with another encoder.
            CorruptFile: The arrays do not fit the description.
        """
        made_with = description.backbone
        if made_with.fingerprint != encoder.fingerprint:
            raise BackboneMismatch(path, made_with.fingerprint, encoder.fingerprint)
        if description.method not in CLASSIFIERS:
            problem = f"its method '{description.method}' is not part of coda-prompt"
            raise CorruptFile(path, problem)
        check_values(arrays, path)
        classes, options = len(description.classes), description.options
        try:
            trained = _checked_trained(_part(arrays, "trained"), description, encoder)
            name = CLASSIFIERS[description.method]
            classifier: Classifier | LinearHead = (
                LinearHead(*(trained[f"head.{each}.frozen"] for each in ("weight", "bias")))
                if name is None and trained
                else _empty_classifier(description.method, encoder, options)
            )
            if isinstance(classifier, Classifier):
                shared = _shared_arrays(classifier, description.method, encoder)
                own = {name: arrays[f"unknown.{name}"] for name in shared}
                own |= _part(arrays, "classifier")
                classifier = Classifier.of_arrays(classifier.options, encoder.width, own, classes)
            statistics = _part(arrays, "unknown")
            width, prior = encoder.plain_width, _prior(encoder)
            detector = UnknownDetector.of_arrays(
                width, statistics, classes, options.removable, prior
            )
            hashes = LearnedHashes.of_arrays(_part(arrays, "duplicates"), classes)
        except (ValueError, LookupError) as error:
            problem = f"its arrays do not fit its classes and backbone ({error})"
            raise CorruptFile(path, problem) from error
        return cls(
            description.method,
            options,
            encoder,
            _recorded(encoder, made_with),
            classifier,
            detector,
            hashes,
            trained,
            tuple(description.tasks),
            tuple(description.edits),
            description.temperature,
            description.number,
            description.parent,
        )


def _integer(name: str) -> int | None:
    try:
        return int(name)
    except ValueError:
        return None


PROMPT_NAMES = ("components", "keys", "attention")


def _empty_classifier(method: str, encoder: Encoder, options: Options) -> Classifier | LinearHead:
    if method not in CLASSIFIERS:
        raise UnknownName("method", method, {AUTO, *CLASSIFIERS})
    name = CLASSIFIERS[method]
    if name is None:
        return LinearHead(np.zeros((0, encoder.width), np.float32), np.zeros(0, np.float32))
    chosen = replace(OPTIONS[name], removable=options.removable, seed=options.seed)
    if chosen.features == "unit":  # as those of an encoder are: moments are shared bit for bit
        chosen = replace(chosen, features="plain")
    return Classifier.empty(chosen, encoder.width)


def _recorded(encoder: Encoder, made_with: BackboneRecord) -> BackboneRecord:
    """Return the record of an encoder, whose file may have moved since a model was made."""
    if encoder.path is None:
        return made_with
    return made_with.model_copy(update={"path": str(encoder.path.absolute())})


def _shared_arrays(classifier: Classifier, method: str, encoder: Encoder) -> set[str]:
    """Return the moments of a classifier that are also those of the unknown score, stored once."""
    same = classifier.options.features != "random" and method not in PROMPTED
    same = same and encoder.plain_width == encoder.width
    return set(classifier.moments.arrays()) if same else set()


def _prior(encoder: Encoder) -> Prior | None:
    arrays = encoder.prior()
    return None if arrays is None else Prior(**arrays)


def _part(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    start = f"{prefix}."
    return {
        name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)
    }


def _checked_trained(
    arrays: dict[str, NDArray[Any]], description: Description, encoder: Encoder
) -> dict[str, NDArray[Any]]:
    """Return what was trained, after checking that it fits the encoder and the classes.

    Raises:
        ValueError, LookupError: It does not.
    """
    expected = description.method in PROMPTED and bool(description.tasks)
    if bool(arrays) != expected:
        raise ValueError("prompts are missing or unexpected")
    if not arrays:
        return arrays
    components, keys, attention = (arrays[f"{name}.frozen"] for name in PROMPT_NAMES)
    blocks, count, length, width = components.shape
    if not count or (blocks, length, width) != encoder.prompt_shape:
        raise ValueError("the prompts do not fit the encoder")
    if keys.shape != (blocks, count, width) or attention.shape != keys.shape:
        raise ValueError("there is not one key for each component")
    own = {f"{name}.frozen" for name in PROMPT_NAMES}
    if description.method == "coda-p":
        rows, sizes = len(description.classes), ("task_sizes.frozen", "component_sizes.frozen")
        weight, bias = (arrays[f"head.{name}.frozen"] for name in ("weight", "bias"))
        if weight.shape != (rows, width) or bias.shape != (rows,):
            raise ValueError("the head has other classes")
        if [arrays[name].sum() for name in sizes] != [rows, count]:
            raise ValueError("its lessons have other classes or components")
        own |= {*sizes, "head.weight.frozen", "head.bias.frozen"}
    if arrays.keys() != own:
        raise ValueError("unexpected arrays")
    if any(
        array.dtype != (np.int64 if "sizes" in name else np.float32)
        for name, array in arrays.items()
    ):
        raise ValueError("they are of another type")
    return arrays


def check_values(arrays: Arrays, path: object) -> None:
    """Check that numbers of a model can be calculated with.

    Raises:
        CorruptFile: There are NaN, infinite, huge or, among counts, negative ones.
    """
    for array in arrays.values():
        low, high = (array.min().item(), array.max().item()) if array.size else (0, 0)
        least, most = (-MAX_SUM, MAX_SUM) if array.dtype.kind == "f" else (0, MAX_COUNT)
        if not (low >= least and high <= most):  # also if one of them is NaN
            raise CorruptFile(path, "it has invalid values: NaN, inf, huge or negative ones")
