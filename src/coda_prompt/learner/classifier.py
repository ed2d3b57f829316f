"""`ContinualClassifier`: an image classifier that learns new classes without storing old images."""

from __future__ import annotations

import contextlib
import html
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coda_prompt import errors
from coda_prompt.images.inputs import Channels, image_items
from coda_prompt.images.labelled import Labelled, labelled
from coda_prompt.learner import edit, evaluation, feedback, findings, hub, lesson, predict, reports
from coda_prompt.learner.backbones import open_encoder
from coda_prompt.learner.card import TASK_HEADS, task_rows
from coda_prompt.learner.display import Predictions
from coda_prompt.learner.folder import ModelFolder, Version, Versions, decode_model
from coda_prompt.learner.model import AUTO, PROMPTED, LearnedModel
from coda_prompt.learner.predict import OnProgress, Prediction
from coda_prompt.learner.records import Options
from coda_prompt.learner.results import Evaluation, Learned
from coda_prompt.statistics.unknown import DEFAULT_RATE, UnknownRule
from coda_prompt.storage.checkpoints import remove_checkpoints

if TYPE_CHECKING:
    from PIL.Image import Image
    from typing_extensions import Self

    from coda_prompt.encoder.encoder import Encoder


class Dataset(Protocol):
    """Pairs of an image and its class, or images."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


Path_: TypeAlias = "str | PathLike[str]"
Images: TypeAlias = "Path_ | bytes | Image | NDArray[Any] | Iterable[Any] | Dataset"
"""Paths, `file://` URLs, bytes, PIL images, arrays, tensors, loaders, datasets: one or many."""


Labels: TypeAlias = "Sequence[str] | Sequence[int] | NDArray[Any] | str"
"""Class names, one for each image; or one for all of them."""

MAX_CLASSES_SHOWN = 10
TRAINING = ("epochs", "batch_size", "learning_rate")
"""Parameters of methods that train prompts."""


class ContinualClassifier:
    """Classify images, and learn new classes at any time on top of a frozen encoder.

    Every call of `learn` is one lesson: it adds classes, or continues classes with more images.
    Images of earlier lessons are not stored and not needed again.

    Args:
        backbone: `auto` (at the first lesson `pocket` for drawings, `photo` for photographs), a
            name (`coda backbones` lists them), `NAME@SIZE` in pixels, `NAME=PATH` for weights in a
            local file, or the path of a file or folder.
        method: `auto` (`ranpac` for drawings, `slda` for photographs); `ranpac`, `slda` and `ncm`
            are solved from statistics; `coda-p-ranpac` and `coda-p` train prompts, which needs the
            extra `research`.
        removable: Store the statistics of each class apart, so that it can be forgotten without a
            trace.
        epochs: Passes over the images, if prompts are trained.
        batch_size: Images of a training step.
        learning_rate: Of the training.
        seed: Of random features, held-out images and trained prompts.
        verbose: Show progress on standard error, and warn (`warnings.warn`) about images that
            should be checked. Without it, warnings are only in the result of `learn`.

    The encoder is loaded, and options are checked, when they are first needed.

    Example:
        ```python
        classifier = ContinualClassifier()
        classifier.learn("photos")  # photos/cat/*.jpg, photos/dog/*.jpg, ...
        classifier.learn("more-photos")
        print(classifier("image.jpg", top=3))
        classifier.save("my-model")
        ```
    """

    _estimator_type = "classifier"  # for scikit-learn before 1.6

    def __init__(
        self,
        backbone: str = AUTO,
        method: str = AUTO,
        *,
        removable: bool = False,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        seed: int = 0,
        verbose: bool = True,
    ) -> None:
        self.backbone, self.method, self.removable = backbone, method, removable
        self.epochs, self.batch_size, self.learning_rate = epochs, batch_size, learning_rate
        self.seed, self.verbose = seed, verbose
        self._reset()

    def _reset(self) -> None:
        """Forget everything that was learned."""
        self._learned: LearnedModel | None = None
        self._versions = Versions()
        self._home: tuple[Path, str | None] | None = None
        self._progress: Path | None = None

    # -- learning

    def fit(self, data: Images, labels: Labels | None = None, **options: Any) -> Self:
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
        self,
        data: Images,
        labels: Labels | None = None,
        classes: ArrayLike | None = None,
        **options: Any,
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
        data: Images | Labelled,
        labels: Labels | None = None,
        *,
        validation: float = 0.2,
        check: Images | Labelled | None = None,
        skip_bad: bool = False,
        channels: Channels = "rgb",
        epochs: int | None = None,
        find_duplicates: bool | None = None,
        progress: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
        on_progress: OnProgress | None = None,
    ) -> Learned:
        """Learn the classes of `data`: new classes, and more images of known ones.

        If this fails or is interrupted, the classifier is left unchanged.

        Args:
            data: A folder of class folders, `hub:owner/name`, or a dataset, `DataLoader` or
                generator of (image, label) pairs. Together with `labels`: images, as in `predict`.
            labels: Classes, one for each image, or one name for all of them. Integers stay
                integers.
            validation: Share of each class that is held out to measure accuracy and to calibrate
                probabilities, and then learned too (not by `coda-p`).
            check: Labelled images of known classes. They are evaluated before and after, to show
                what this lesson made the model forget.
            skip_bad: Leave out images that cannot be read instead of failing.
            channels: Order of the colours in arrays: `rgb`, or `bgr` as in frames of OpenCV.
            epochs: Passes over the images, for this lesson only.
            find_duplicates: Name images that resemble one of an earlier lesson that had this
                option. Stores a hash of 15 bytes of each image of this lesson in the model.
                Default: as in the lessons before.
            progress: A folder for checkpoints of the training of prompts. The same call resumes an
                interrupted one from there; `save` removes the folder.
            stop: Polled between images and steps; once true, the lesson ends.
            on_progress: Called with the progress.

        Returns:
            What was learned and how accurate it is.

        Raises:
            BadImages: Images that cannot be read, without `skip_bad`.
            BadOption: The data or an option cannot be used.
            Interrupted: `stop` became true.
            MissingExtra: Prompts are trained, and torch is not installed.
            UnfinishedLesson: `progress` has checkpoints of a different lesson.

        Example:
            ```python
            learned = classifier.learn("photos", check="validation-photos")
            print(learned.accuracy, learned.forgotten)
            ```
        """
        images = labelled(data, labels, skip_bad=skip_bad, channels=channels)
        chosen = self.choose_backbone(images)
        checked = None if check is None else labelled(check, part="test", skip_bad=skip_bad)
        bar = feedback.LearnerProgress() if self.verbose and on_progress is None else None
        options = lesson.LessonOptions(
            validation=validation,
            skip_bad=skip_bad,
            find_duplicates=find_duplicates,
            training=self._training(epochs),
            progress=progress,
            stop=stop,
            on_progress=bar.on_progress if bar else on_progress or (lambda progress: None),
        )
        before = self._with_label_type(self.model, images)
        with bar or contextlib.nullcontext():
            model, learned = lesson.teach(before, images, options, checked)
        self._progress = progress
        self._follow(model)
        if self.verbose:
            feedback.warn((*learned.warnings, *learned.hints))
        return replace(learned, chosen=chosen)

    def choose_backbone(self, images: Labelled) -> str | None:
        """Resolve `auto` by the images of the first lesson; later lessons keep the encoder.

        Returns:
            Which encoder and why; None if there was nothing to choose.
        """
        if self.backbone != AUTO or (self._learned is not None and self._learned.tasks):
            return None
        name, reason = findings.choose_backbone(images.samples)
        if name == "photo" and self.method in PROMPTED:  # the part of it that takes prompts
            name = "photo-vit"
        if self._learned is None or name != self.backbone_name:
            self._learned = self._empty(name)
        return reason

    def _training(self, epochs: int | None) -> dict[str, Any]:
        """Return the options of the training that were given.

        Raises:
            BadOption: There is nothing to train.
        """
        given = {name: getattr(self, name) for name in TRAINING}
        given = {name: value for name, value in given.items() if value is not None}
        if epochs is not None:
            if self.method not in PROMPTED:
                problem = f"{self.method} has nothing to train; leave it out"
                raise errors.BadOption("learn", "epochs", problem)
            given["epochs"] = epochs
        return given

    @staticmethod
    def _with_label_type(model: LearnedModel, images: Labelled) -> LearnedModel:
        """Let classes be integers as long as all of them were given as integers."""
        integers = images.integers and (model.options.integers or not model.tasks)
        options = model.options.model_copy(update={"integers": integers})
        return replace(model, options=options)

    # -- predicting

    def __call__(
        self,
        data: Images,
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

        Raises:
            BadImages: Images that cannot be read.
            BadOption: The model was made with too few images for `auto`.
            NotLearned: No class has been learned yet.

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
        answers = predict.predict(self.model, images, top=top, rule=rule)
        return Predictions(images, [answer for _, answer in answers])

    def predict(self, data: Images, *, channels: Channels = "rgb") -> NDArray[Any]:
        """Return the most likely class of each image.

        Args:
            data: One or many images: paths, `file://` URLs, bytes, file objects, PIL images,
                arrays or tensors; a folder stands for the images in it. Also a generator, a
                `DataLoader`, or a `Dataset` of Hugging Face.
            channels: Order of the colours in arrays: `rgb`, or `bgr` as in frames of OpenCV.

        Returns:
            One class for each image: a name, or an integer if the classes were given as such.

        Raises:
            BadImages: Images that cannot be read.
            NotLearned: No class has been learned yet.
        """
        found = predict.answers(self.model, image_items(data, channels))
        rows = [int(each.probabilities.argmax()) for _, each in found]
        return np.array(self.model.labels)[rows]

    def predictions(
        self,
        data: Images,
        *,
        top: int = 5,
        unknown: Literal["auto"] | None = None,
        unknown_rate: float = DEFAULT_RATE,
        unknown_below: float = 0.0,
    ) -> list[Prediction]:
        """Return the most likely classes of each image with their probabilities.

        Args:
            data: As in `predict`.
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
        rule = UnknownRule.parse(unknown, unknown_rate, unknown_below)
        found = predict.predict(self.model, image_items(data), top=top, rule=rule)
        return [prediction for _, prediction in found]

    def predict_proba(self, data: Images) -> NDArray[np.float64]:
        """Return calibrated probabilities, images x classes, in the order of `classes_`."""
        found = predict.answers(self.model, image_items(data))
        rows = [each.probabilities for _, each in found]
        return np.stack(rows) if rows else np.zeros((0, len(self.classes_)))

    def score(self, data: Images, labels: Labels | None = None) -> float:
        """Return the share of images that are classified correctly."""
        return self.evaluate(data, labels).accuracy

    def evaluate(
        self,
        data: Images | Labelled,
        labels: Labels | None = None,
        *,
        unknown: Images | None = None,
        unknown_rate: float = DEFAULT_RATE,
        skip_bad: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Evaluation:
        """Measure accuracy overall, for each class and for each lesson, among all known classes.

        Args:
            data: Labelled images, as for `learn`.
            labels: Classes, one for each image.
            unknown: Images of classes that were not learned, as for `predict`: measure how well
                they are separated from `data`.
            unknown_rate: The share of `data` that may be rejected by mistake.
            skip_bad: Leave out images that cannot be read and classes that were not learned,
                instead of failing.
            on_progress: Called with the progress.

        Raises:
            BadImages: Images that cannot be read, without `skip_bad`.
            BadOption: There are `unknown` images, and the model cannot recognise them.
            NotLearned: The images have classes that were not learned.
        """
        images = labelled(data, labels, part="test", skip_bad=skip_bad)
        model, others = self.model, None if unknown is None else image_items(unknown)
        if skip_bad and set(images.names) & set(model.classes):
            images = images.only(model.classes)
        return evaluation.evaluate(
            model, images, others, unknown_rate, skip_bad=skip_bad, on_progress=on_progress
        )

    # -- editing

    def rename(self, old: str, new: str) -> None:
        """Give a class another name.

        Raises:
            NotLearned: There is no class `old`.
            CannotEdit: There is a class `new` already; `merge_classes` merges them.
        """
        self._follow(edit.renamed(self.model, old, new))

    def merge_classes(self, names: Sequence[str], into: str) -> None:
        """Unite classes into one, as if their images had been taught under one name.

        Args:
            names: Two or more known classes.
            into: Name of the class they become: one of them, or a new name.

        Raises:
            CannotEdit: The method has no sums, or the name belongs to another class.
        """
        self._follow(edit.with_united_classes(self.model, names, into))

    def forget(self, name: str) -> edit.Forgotten:
        """Remove a class from the model and from all its versions; this cannot be undone.

        Stored versions are rewritten when the classifier is saved.

        Returns:
            What of it remains in sums over all classes; nothing in a removable model.

        Raises:
            CannotEdit: The method has no sums, or it is the only class.
        """
        model, versions, forgotten = edit.forgotten(self.model, self._versions, name)
        self._learned = model
        current = Version.of(model.description(), model.arrays())
        self._versions = replace(versions, current=current)
        return forgotten

    def relabel(
        self, data: Images | Labelled, labels: Labels | None = None, *, taught_as: str
    ) -> dict[str, int]:
        """Move images that were taught as the wrong class to the right one.

        Args:
            data: The same images with the right labels, as for `learn`.
            labels: Class names, one for each image.
            taught_as: The class they were taught as.

        Returns:
            The number of images that each class received.

        Raises:
            CannotEdit: The method has no sums, or the class has no more images.
        """
        model, counts = edit.relabelled(self.model, labelled(data, labels), taught_as)
        self._follow(model)
        return counts

    @classmethod
    def merge(cls, classifiers: Sequence[Self], *, count_twice: bool = False) -> Self:
        """Join what classifiers have learned on the same encoder; classes of one name are merged.

        The result equals one classifier that was taught the lessons of all, in this order.

        Args:
            classifiers: Two or more.
            count_twice: Join them also if they have learned the same images, which then count more
                than once. These are recognised by their hashes (`find_duplicates` in `learn`);
                without hashes, only the same files and classes of the same images are.

        Raises:
            CannotEdit: Method, options or encoder differ, the method has no sums, or two of them
                have learned the same images, without `count_twice`.
        """
        model = edit.joined([each.model for each in classifiers], count_twice=count_twice)
        joined = cls(**classifiers[0].get_params())
        joined._follow(replace(model, number=0))
        return joined

    def join(self, content: bytes, name: str, *, count_twice: bool = False) -> None:
        """Add what another model has learned, as a new version; nothing that it names is opened.

        Args:
            content: The `model.safetensors` of the other model, which is not trusted.
            name: What messages call it.
            count_twice: As in `merge`.

        Raises:
            CannotEdit: As in `merge`.
            CorruptFile: It is damaged.
        """
        description, arrays = decode_model(content, name)
        edit.check_mergeable(self.model, description)
        other = LearnedModel.of_file(description, arrays, self.model.encoder, name)
        self._follow(edit.joined([self.model, other], count_twice=count_twice))

    # -- versions

    @property
    def can_undo(self) -> bool:
        """Whether there is an earlier version."""
        return bool(self._versions.before)

    @property
    def can_redo(self) -> bool:
        """Whether there is a version that was undone."""
        return bool(self._versions.after)

    def undo(self, to: int | None = None) -> None:
        """Restore an earlier version, bit for bit: what was before the newest lesson or edit.

        Args:
            to: Number of the version, as in `history`; by default the one before.

        Raises:
            NothingToUndo: There is no such version.
        """
        self._restore(self._versions.moved_to("The classifier", to))

    def redo(self) -> None:
        """Restore the version that `undo` replaced, bit for bit.

        Raises:
            NothingToUndo: There is no such version: a new lesson or edit drops the undone ones.
        """
        self._restore(self._versions.moved_to("The classifier", redo=True))

    def _restore(self, versions: Versions) -> None:
        current = versions.current
        assert current is not None
        name = f"version {current.number}"
        self._learned = LearnedModel.of_file(*current.read(), self.model.encoder, name)
        self._versions = versions

    def _follow(self, model: LearnedModel) -> None:
        """Record that a lesson or an edit has replaced the current version by a new one."""
        number, current = self._versions.next_number, self._versions.current
        parent = None if current is None else current.number
        self._learned = replace(model, number=number, parent=parent)
        version = Version.of(self._learned.description(), self._learned.arrays())
        self._versions = self._versions.followed_by(version)

    def history(self) -> reports.ModelHistory:
        """Return the lessons and edits, and the versions that can be restored."""
        return reports.history(self._versions, self._home and self._home[0])

    # -- files

    def save(self, folder: Path_) -> None:
        """Write the model; if this is interrupted, the folder has one complete version.

        Raises:
            ModelChanged: Another process changed the folder since this classifier was loaded from
                it or saved to it.
        """
        target = ModelFolder(Path(folder))
        with target.writing():
            current = (target.path.resolve(), target.sha256)
            if self._home is not None and self._home[0] == current[0] and self._home != current:
                raise errors.ModelChanged(target.path)
            self.write(target)

    def write(self, folder: ModelFolder) -> None:
        """Write the model like `save`, for a caller that has locked the folder."""
        if self._versions.current is None:  # nothing has been learned
            version = Version.of(self.model.description(), self.model.arrays())
            self._versions = Versions(current=version)
        self._versions = folder.commit(self._versions)
        self._home = (folder.path.resolve(), folder.sha256)
        if self._progress is not None:
            remove_checkpoints(self._progress)
            self._progress = None

    @classmethod
    def load(
        cls,
        folder: Path_,
        *,
        backbone: str | Encoder | None = None,
        verbose: bool = True,
    ) -> Self:
        """Load a saved model together with its encoder. No code in the folder is ever run.

        Args:
            folder: The model folder.
            backbone: The encoder, if it is a file that has moved: `NAME=PATH` or `PATH`. Or a
                loaded encoder, to share it among classifiers. The fingerprint is checked.
            verbose: As in the constructor.

        Raises:
            CorruptFile: The model is damaged.
            MissingData: There is no model in the folder.
            BackboneMismatch: The encoder is not the one the model was made with.
        """
        source = ModelFolder(Path(folder))
        classifier = cls._of_file(*source.read(), source.path, backbone, verbose)
        classifier._versions = source.versions()
        classifier._home = (source.path.resolve(), source.sha256)
        return classifier

    @classmethod
    def _of_file(
        cls,
        description: Any,
        arrays: Any,
        name: Path,
        backbone: str | Encoder | None,
        verbose: bool,
    ) -> Self:
        """Return a classifier that has learned what is in a model called `name`."""
        made_with = description.backbone
        encoder = open_encoder(made_with, backbone, name)
        model = LearnedModel.of_file(description, arrays, encoder, name)
        options = description.options
        classifier = cls(
            made_with.name,
            description.method,
            removable=options.removable,
            seed=options.seed,
            verbose=verbose,
        )
        classifier._learned = model
        return classifier

    def save_pretrained(self, folder: Path_) -> None:
        """Write the model like `save`: the folder has the layout of the Hugging Face hub."""
        self.save(folder)

    @classmethod
    def from_pretrained(
        cls,
        name: Path_,
        *,
        revision: str | None = None,
        backbone: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> Self:
        """Load a model from a folder or from the Hugging Face hub.

        Args:
            name: A folder, or `owner/name` on the hub.
            revision: Branch, tag or commit on the hub.
            backbone: As in `load`.
            token: Access token of the hub.
            endpoint: URL of another hub.
        """
        if Path(name).is_dir():
            return cls.load(name, backbone=backbone)
        version = hub.download_model(str(name), revision, token, endpoint)
        classifier = cls._of_file(*version.read(), Path(name), backbone, verbose=True)
        classifier._versions = Versions(current=version)
        return classifier

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload the model and its card to `owner/name` on the hub; return the commit's URL."""
        return hub.upload_model(name, self.model, private=private, token=token, endpoint=endpoint)

    def export_onnx(self, path: Path_) -> None:
        """Write the model with its encoder as one ONNX graph, and `predict.py` beside it.

        Raises:
            MissingExtra: The package for ONNX files is not installed.
            NotLearned: No class has been learned yet.
        """
        from coda_prompt.learner.export import export_onnx

        export_onnx(self.model, Path(path))

    # -- state

    @property
    def model(self) -> LearnedModel:
        """What has been learned, as a value; loads the encoder once."""
        if self._learned is None:
            self._learned = self._empty("pocket" if self.backbone == AUTO else self.backbone)
        return self._learned

    def _empty(self, backbone: str) -> LearnedModel:
        options = Options(removable=self.removable, seed=self.seed)
        return LearnedModel.empty(open_encoder(None, backbone, None), self.method, options)

    @property
    def method_name(self) -> str:
        """Name of the method; with `auto`, the one that was chosen."""
        return self.model.method

    @property
    def backbone_name(self) -> str:
        """Name of the encoder; with `auto`, the one that was chosen."""
        return self.model.backbone.name

    @property
    def classes_(self) -> list[Any]:
        """The classes, in the order in which they were learned: names or integers."""
        return [] if self._learned is None else self._learned.labels

    @property
    def tasks_(self) -> list[dict[str, Any]]:
        """One record for each lesson: date, classes, images, accuracy at the time."""
        return [task.model_dump() for task in (self._learned.tasks if self._learned else ())]

    @property
    def temperature(self) -> float:
        """Divides the scores before they become probabilities."""
        return self.model.temperature

    # -- parameters, as scikit-learn expects them

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments of the constructor, as scikit-learn asks for them."""
        return {name: getattr(self, name) for name in _parameters()}

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; what was learned is not changed until `fit`.

        Example:
            ```python
            classifier.set_params(method="coda-p", epochs=5)
            ```

        Raises:
            UnknownName: There is no such parameter.
        """
        for name, value in params.items():
            if name not in _parameters():
                raise errors.UnknownName("parameter", name, _parameters())
            setattr(self, name, value)
        if not self.classes_:
            self._reset()
        return self

    def __sklearn_clone__(self) -> Self:
        """Return a classifier with the same parameters that has learned nothing."""
        return type(self)(**self.get_params())

    def __sklearn_is_fitted__(self) -> bool:
        return bool(self.classes_)

    def __sklearn_tags__(self) -> Any:
        """Describe the classifier to scikit-learn 1.6 and later, which alone calls this."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=False),
            classifier_tags=ClassifierTags(),
            input_tags=InputTags(two_d_array=False, three_d_array=True, string=True),
        )

    # -- display

    def __repr__(self) -> str:
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name, each in _parameters().items()
            if getattr(self, name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})\n{self._summary()}"

    def _repr_html_(self) -> str:
        """Return the table of lessons for notebooks."""
        lines = [f"<p>{html.escape(self._summary())}</p><table>"]
        for row in task_rows(self._learned.tasks if self._learned else []):
            if row[0] == 1:
                lines.append(f"<tr><th>{'</th><th>'.join(TASK_HEADS)}</th></tr>")
            cells = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row)
            lines.append(f"<tr>{cells}</tr>")
        return "\n".join([*lines, "</table>"])

    def _summary(self) -> str:
        """Return in one line what has been learned."""
        model = self._learned
        if model is None or not model.tasks:
            return f"nothing learned yet; {self.method} on {self.backbone}"
        names = errors.join_names(model.classes, MAX_CLASSES_SHOWN)
        return (
            f"{errors.counted(len(model.classes), 'class')} in "
            f"{errors.counted(len(model.tasks), 'lesson')}, {model.method} "
            f"on {model.backbone.name}: {names}"
        )


def _parameters() -> dict[str, inspect.Parameter]:
    """Return the arguments of the constructor."""
    signature = inspect.signature(ContinualClassifier.__init__).parameters
    return {name: each for name, each in signature.items() if name != "self"}


@contextlib.contextmanager
def edited(
    folder: ModelFolder, *, forgets: bool = False, backbone: str | Encoder | None = None
) -> Iterator[ContinualClassifier]:
    """Load the model of a folder for an edit, and write it at the end of the block.

    The folder is locked, so no other process writes in between.

    Args:
        folder: A model folder.
        forgets: Whether the edit forgets a class, so that all else that has its name or images
            is deleted before the model is written.
        backbone: As in `ContinualClassifier.load`.

    Raises:
        FolderBusy: Another process is writing.
    """
    folder.read()  # before the lock creates a folder
    with folder.writing():
        classifier = ContinualClassifier.load(folder.path, verbose=False, backbone=backbone)
        yield classifier
        if forgets:
            remove_checkpoints(folder.progress)
            classifier._versions = folder.forget_traces(classifier._versions)
        classifier.write(folder)


def load_or_create(
    folder: ModelFolder, backbone: str | None, method: str | None, removable: bool = False
) -> ContinualClassifier:
    """Load the model in a folder, or make a new one if there is none.

    Args:
        folder: The model folder.
        backbone: As in `ContinualClassifier.load`.
        method: The method of a new model; of an existing one, the method it has to have.
        removable: Classes can be forgotten without a trace.

    Raises:
        BadOption: The model was made with another backbone or method, or without `removable`.
    """
    if not folder.exists:
        return ContinualClassifier(
            backbone or AUTO, method or AUTO, removable=removable, verbose=False
        )
    classifier = ContinualClassifier.load(folder.path, backbone=backbone, verbose=False)
    made_with = classifier.method
    if method not in (None, AUTO, made_with):
        problem = f"this model was made with {made_with}; make another model for {method}"
        raise errors.BadOption("the model", "method", problem)
    if removable and not classifier.removable:
        problem = f"{folder.path} was made without it; it is decided at the first lesson"
        raise errors.BadOption("coda learn", "removable", problem)
    return classifier
