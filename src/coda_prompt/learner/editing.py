"""Edit what was taught: rename, merge, forget and relabel classes, and join models.

Editing changes the method and the other additive states of a classifier (`additive_states`) and the
records of its lessons. If it fails, the classifier is left unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from coda_prompt import errors
from coda_prompt.console import class_name
from coda_prompt.learner import held_out, store
from coda_prompt.learner.duplicates import LearnedHashes, hash_images
from coda_prompt.learner.network import check_values
from coda_prompt.learner.store import Description, EditRecord, Model, TaskRecord
from coda_prompt.learner.unknown import UnknownDetector
from coda_prompt.learner.versions import History
from coda_prompt.research.methods import TaskBrief
from coda_prompt.research.methods.additive import AdditiveMethod, AdditiveState
from coda_prompt.research.streams.stream import Samples
from coda_prompt.research.training.checkpointing import remove_checkpoints

if TYPE_CHECKING:
    from coda_prompt.images.labelled import Labelled
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.editable import EditableEstimator
    from coda_prompt.learner.network import Network

Classifier = TypeVar("Classifier", bound="EditableEstimator")
COUNT_TWICE = "join them anyway with --count-twice (count_twice=True)"
ROUNDING = 1e-4
"""Of the sum of a class's features. Sums of the same images differ less, other images more."""
NOTHING_REMAINS = "nothing of it remains in the sums"


@dataclass(frozen=True)
class Forgotten:
    """What `forget` removed."""

    name: str
    images: int
    """Images of the class that had been taught, including held-out ones."""
    versions: int
    """Stored versions that had the class and were rewritten."""
    remains: str
    """What of the class remains in sums over all classes."""


@contextlib.contextmanager
def edited(folder: Path, *, forgets: bool = False, **parts: Any) -> Iterator[ContinualClassifier]:
    """Load the model of a folder for an edit, and write it at the end of the block.

    The folder is locked, so no other process writes in between.

    Args:
        folder: A model folder.
        forgets: Whether the edit forgets a class, so that all else that has its name or images
            is deleted before the model is written.
        **parts: As in `ContinualClassifier.load`.

    Raises:
        FolderBusy: Another process is writing.
    """
    from coda_prompt.learner.classifier import ContinualClassifier

    store.read_model(folder)  # before the lock creates a folder
    with store.exclusive_writer(folder):
        classifier = ContinualClassifier.load(folder, verbose=False, **parts)
        yield classifier
        if forgets:
            remove_checkpoints(folder / store.PROGRESS)
            store.remove_traces(folder, classifier._history)
        classifier.write(folder)


def additive_states(classifier: EditableEstimator) -> list[AdditiveState]:
    """Return the method and every other state that adds up over images.

    Raises:
        CannotEdit: What the method has learned is not a sum over images.
    """
    method = classifier.network.method
    if not isinstance(method, AdditiveMethod):
        reason = "is trained by gradients on all images of a lesson together"
        if method.closed_form:
            reason = "stores no sums over the images of single classes"
        raise errors.CannotEdit(
            f"{classifier.network.entry.name} {reason}: single classes cannot be edited afterwards",
            "Undo the lesson and teach the corrected images, or use ranpac, slda or ncm "
            "(to merge or forget classes, also coda-p-ranpac).",
        )
    return [method, classifier.network.hashes, classifier.network.detector]


def rename(classifier: EditableEstimator, old: str, new: str) -> None:
    """Give a class another name; `ContinualClassifier.rename` documents it."""
    old, new = known_name(classifier, old), class_name(new)
    _check_free(classifier, new, ())
    previous = classifier._model()
    tasks = rewritten(previous.description.tasks, {old: new})
    classifier._replace(previous, tasks, _edit(tasks, f"renamed {old} to {new}", [old], new))


def merge_classes(classifier: EditableEstimator, names: Sequence[str], into: str) -> None:
    """Merge classes; `ContinualClassifier.merge_classes` documents it."""
    names, into = [known_name(classifier, name) for name in names], class_name(into)
    rows = sorted({classifier.classes_.index(name) for name in names})
    if len(rows) < 2:
        raise errors.CannotEdit("two different classes are needed to merge them")
    _check_free(classifier, into, names)
    previous = classifier._model()
    with _unchanged_on_error(classifier, previous):
        for state in additive_states(classifier):
            state.unite_classes(rows, rows[0])
        tasks = rewritten(previous.description.tasks, dict.fromkeys(names, into))
        what = f"merged {errors.join_names(names)} into {into}"
        classifier._replace(previous, tasks, _edit(tasks, what, names, into))


def forget(classifier: EditableEstimator, name: str) -> Forgotten:
    """Remove a class from all versions; `ContinualClassifier.forget` documents it."""
    name = known_name(classifier, name)
    if len(classifier.classes_) == 1:
        raise errors.CannotEdit("it is the only class", "Delete the model folder instead.")
    additive_states(classifier)
    current, history = classifier._model(), classifier._history
    images = sum(task.images.get(name, 0) for task in current.description.tasks)
    remains = _what_remains(classifier, name)
    history.read_all()
    with _unchanged_on_error(classifier, current):
        before, now = (
            [_without(classifier, each, names_in(each, current, name)) for each in models]
            for models in (history.before, [current])
        )
    assert now[0] is not None
    pairs = list(zip(history.before, before, strict=True))
    changed = sum(old is not new for old, new in pairs) + len(history.after)
    history.before = [
        new if new is old else _with_forgotten_class(new) for old, new in pairs if new is not None
    ]
    history.after = []
    forgotten = _with_forgotten_class(now[0])
    classifier.network.set_state(forgotten, "the edited model")
    classifier._saved = None
    return Forgotten(name, images, changed, remains)


def _with_forgotten_class(version: Model) -> Model:
    """Record in a version that a class was removed from it; its name is not recorded."""
    description = version.description
    edits = [*description.edits, _edit(description.tasks, "forgot a class", [])]
    return Model(description.model_copy(update={"edits": edits}), version.tensors)


def relabel(classifier: EditableEstimator, images: Labelled, taught_as: str) -> dict[str, int]:
    """Move images to the right classes; `ContinualClassifier.relabel` documents it."""
    taught_as = known_name(classifier, taught_as)
    source = classifier.classes_.index(taught_as)
    counts = images.counts()
    if taught_as in counts:
        raise errors.CannotEdit(f"the images of {taught_as} have the name they were taught as")
    taught = sum(task.images.get(taught_as, 0) for task in classifier.network.tasks)
    if sum(counts.values()) >= taught:
        raise errors.CannotEdit(
            f"{taught_as} was taught with {errors.counted(taught, 'image')}, and "
            f"{sum(counts.values())} would leave",
            "Use rename or merge-classes for a whole class.",
        )
    from coda_prompt.research.training.engine import Engine  # slow to import

    previous, known = classifier._model(), classifier.classes_
    new = [name for name in images.names if name not in known]
    names = [*known, *new]
    labels = np.array([names.index(name) for name in images.names])[images.split.labels]
    with _unchanged_on_error(classifier, previous):
        states = additive_states(classifier)
        samples = Samples(images.split, np.arange(len(labels)), labels)
        network, method = classifier.network, classifier.network.method
        engine = Engine(network.views, network.training, fabric=network.fabric)
        features, _ = engine.features_and_queries(method, samples)
        if new:
            _open_classes(classifier, states, len(new))
        rows = torch.from_numpy(labels).to(features.device)
        tokens = engine.plain_tokens(method, samples)
        hashes = hash_images(images) if len(network.hashes.rows) else torch.zeros(len(rows), 0)
        tasks = _relabelled(network.tasks, taught_as, counts, new)
        what = f"relabelled {errors.counted(len(labels), 'image')} of {taught_as}"
        try:
            for state in states:
                own = tokens if isinstance(state, UnknownDetector) else features
                own = hashes if isinstance(state, LearnedHashes) else own
                state.move_images(own, source, rows)
            classifier._replace(previous, tasks, _edit(tasks, what, [taught_as, *images.names]))
        except LinAlgError as error:  # the classes would have negative variances
            raise errors.CannotEdit(
                f"these images were not taught as {taught_as}",
                "Give only images that were, without those held out to measure the lesson.",
            ) from error
    return counts


def merge(classifiers: Sequence[Classifier], count_twice: bool = False) -> Classifier:
    """Join classifiers; `ContinualClassifier.merge` documents it."""
    if len(classifiers) < 2:
        raise errors.CannotEdit("two or more models are needed")
    first, *others = classifiers
    joined = copy.copy(first)
    joined._network, joined._history = first.network.copied(), History()
    joined._home, joined._saved, joined._checkpointer = None, None, None
    join(joined, others, count_twice)
    joined._history = History()
    return joined


def join_model(
    classifier: EditableEstimator, model: Model, path: object, count_twice: bool = False
) -> None:
    """Add what an untrusted model has learned to a classifier; nothing that it names is opened.

    Args:
        classifier: What it is added to, as a new version.
        model: The other model.
        path: Its name in error messages.
        count_twice: As in `join`.

    Raises:
        CannotEdit: As in `ContinualClassifier.merge`.
        CorruptFile: The tensors do not fit the description.
    """
    check_mergeable(classifier, model.description)
    other = copy.copy(classifier)
    other._network, other._history = classifier.network.copied(), History()
    other._network.set_state(model, path)
    other._saved = model
    join(classifier, [other], count_twice)


def join(
    classifier: EditableEstimator, others: Sequence[EditableEstimator], count_twice: bool = False
) -> None:
    """Add what others have learned to a classifier, as a new version of it.

    Args:
        classifier: What the others are added to.
        others: Classifiers of the same method and backbone.
        count_twice: Whether images that several of them have learned may count more than once.

    Raises:
        CannotEdit: As in `ContinualClassifier.merge`.
    """
    for other in others:
        check_mergeable(classifier, other._model().description)
    if not count_twice:
        _refuse_common_images([classifier, *others])
    previous, tasks = classifier._model(), list(classifier.network.tasks)
    with _unchanged_on_error(classifier, previous):
        for other in others:
            tasks = rewritten([*tasks, *other.network.tasks], {})
            names = [name for task in tasks for name in task.new]
            rows = [names.index(name) for name in other.classes_]
            pairs = zip(additive_states(classifier), additive_states(other), strict=True)
            for state, others_state in pairs:
                state.absorb(others_state, rows)
        edit = _edit(tasks, f"joined {1 + len(others)} models", [])
        classifier._replace(previous, tasks, edit)
        check_values(classifier.network.tensors(), "The joined model")
        classifier.network.detector.scorer()  # raises if its statistics contradict each other


def known_name(classifier: EditableEstimator, text: str) -> str:
    """Return the name of a class in the spelling of the classifier.

    Raises:
        NotLearned: There is no such class.
    """
    name = class_name(text)
    if name not in classifier.classes_:
        raise errors.NotLearned([name], classifier.classes_)
    return name


def rewritten(tasks: Sequence[TaskRecord], names: Mapping[str, str | None]) -> list[TaskRecord]:
    """Return the records of lessons with other class names.

    Args:
        tasks: Lessons in order.
        names: Old name -> new name; None: the class is left out. A class whose name was introduced
            before is continued.
    """
    seen: set[str] = set()
    result = []
    for task in tasks:
        new, continued, images = list[str](), list[str](), dict[str, int]()
        for old in (*task.new, *task.continued):
            name = names.get(old, old)
            if name is None:
                continue
            images[name] = images.get(name, 0) + task.images.get(old, 0)
            if name not in seen:
                new.append(name)
                seen.add(name)
            elif name not in new and name not in continued:
                continued.append(name)
        predictions = held_out.renamed(task.predictions, names)
        changes: dict[str, Any] = {
            "new": new,
            "continued": continued,
            "images": images,
            "predictions": predictions,
        }
        if (accuracy := held_out.accuracy(predictions)) != held_out.accuracy(task.predictions):
            changes["accuracy"] = accuracy
        if len(images) < len(task.images):  # no longer the classes it was measured among
            changes["accuracy_own"] = None
        if None in names.values():  # nothing of a class that is left out remains
            changes["files"] = changes["drawings"] = None
        result.append(task.model_copy(update=changes))
    return result


def names_in(version: Any, current: Model, name: str) -> set[str]:
    """Return the names in another version of a class of the current version.

    Args:
        version: An earlier or undone version.
        current: The current version.
        name: A class of the current version. If it was merged from several classes, these are
            returned for versions before that; if it was merged with others in an undone version,
            the class they became is returned.
    """
    names, own = {name}, version.description.edits
    for edit in reversed([edit for edit in current.description.edits if edit not in own]):
        if edit.into in names:
            names = (names - {edit.into}) | set(edit.names)
        elif edit.into is not None:  # the old names belonged to other classes then
            names -= set(edit.names)
    for edit in own:
        if edit not in current.description.edits and edit.into and names & set(edit.names):
            names = (names - set(edit.names)) | {edit.into}
    return names & set(version.description.classes)


def _without(classifier: EditableEstimator, version: Any, names: Collection[str]) -> Model | None:
    """Return a version without some classes, itself if it has none; None if it has no other."""
    description = version.description
    aliases, mentioned = set(names), list[EditRecord]()
    for edit in reversed(description.edits):
        if aliases & {*edit.names, edit.into}:
            mentioned.append(edit)
            aliases |= set(edit.names) if edit.into in aliases else set()
    if not names and not mentioned:
        assert isinstance(version, Model)
        return version
    if len(description.classes) == len(names):
        return None
    classifier.network.set_state(version, f"version {version.number}")
    for state in additive_states(classifier):
        state.drop_classes([description.classes.index(name) for name in names])
    tasks = rewritten(description.tasks, dict.fromkeys(names))
    classifier.network.set_tasks(tasks)
    changes = {
        "tasks": tasks,
        "temperature": classifier.network.temperature,
        "classes": [each for task in tasks for each in task.new],
        "number": version.number,
        "edits": [edit for edit in description.edits if edit not in mentioned],
    }
    return Model(description.model_copy(update=changes), classifier.network.tensors())


def _what_remains(classifier: EditableEstimator, name: str) -> str:
    """Say what of a class `forget` cannot remove."""
    if classifier.removable:
        return NOTHING_REMAINS
    remains = (
        "its name, mean and count are removed; the scatter of its images around their mean remains "
        "in the covariance that all classes share (use --removable for a model without this)"
    )
    if not classifier.network.method.closed_form and name in classifier.network.tasks[0].new:
        remains += ", and the prompts were trained on its images"
    return remains


def _open_classes(classifier: EditableEstimator, states: Sequence[AdditiveState], new: int) -> None:
    """Add classes without images."""
    method = classifier.network.method
    rows = tuple(range(method.classes_seen, method.classes_seen + new))
    index, labels = len(method.task_sizes), torch.zeros(0, dtype=torch.int64)
    method.begin_task(TaskBrief(index, classifier.network.training.seed, rows, labels))
    method.end_task()
    for state in states[1:]:
        grow: Callable[[int], None] = state.grow  # type: ignore[attr-defined]
        grow(rows[-1] + 1)


def _relabelled(
    tasks: Sequence[TaskRecord], taught_as: str, counts: Mapping[str, int], new: Sequence[str]
) -> list[TaskRecord]:
    """Return the records with images counted under other classes, in the newest lesson."""
    result, left = [], sum(counts.values())
    for task in tasks:
        moved = min(left, task.images.get(taught_as, 0))
        left -= moved
        images = {name: n - moved if name == taught_as else n for name, n in task.images.items()}
        result.append(task.model_copy(update={"images": images}))
    *earlier, last = result
    known = {*last.new, *last.continued, *new}
    changes = {
        "new": [*last.new, *new],
        "continued": [*last.continued, *(name for name in counts if name not in known)],
        "images": {
            **last.images,
            **{name: last.images.get(name, 0) + count for name, count in counts.items()},
        },
    }
    return [*earlier, last.model_copy(update=changes)]


def _check_free(classifier: EditableEstimator, name: str, own: Sequence[str]) -> None:
    if name in classifier.classes_ and name not in own:
        remedy = "Merge the classes with merge-classes, or choose another name."
        raise errors.CannotEdit(f"a class '{name}' already exists", remedy)


def check_mergeable(classifier: EditableEstimator, other: Description) -> None:
    """Check from its description alone that the sums of a model are of the same features.

    Raises:
        CannotEdit: They are not.
    """
    additive_states(classifier)
    own = classifier._model().description
    pairs = {
        "method": (own.method, other.method),
        "method file": (own.method_sha256, other.method_sha256),
        "backbone": (own.backbone.fingerprint[:16], other.backbone.fingerprint[:16]),
        "preprocessing": (own.pixels, other.pixels),
        "options": (own.options, other.options),
        "seed": (own.training.get("seed"), other.training.get("seed")),
    }
    for what, (mine, others) in pairs.items():
        if mine != others:
            raise errors.CannotEdit(f"the models differ in their {what}: {mine} and {others}")


def _refuse_common_images(classifiers: Sequence[EditableEstimator]) -> None:
    """Refuse models that have learned the same images, which would count twice."""
    lessons = [task for each in classifiers for task in each.network.tasks]
    for index, lesson in enumerate(lessons):
        if lesson in lessons[:index] and lesson.images:
            raise errors.CannotEdit(
                f"two models have the lesson of {lesson.date} ({errors.join_names(lesson.new)}) in "
                "common, and its images would count twice",
                f"Undo it in one of them, or {COUNT_TWICE}.",
            )
    for index, later in enumerate(classifiers):
        for earlier in classifiers[:index]:
            if common := common_images(earlier.network, later.network):
                each = [f"{name} {count}" for name, count in common.items()]
                total = errors.counted(sum(common.values()), "image")
                raise errors.CannotEdit(
                    f"both models have learned the same images ({errors.join_names(each)}), and "
                    f"{total} would count twice",
                    f"Forget these classes in one of them, or {COUNT_TWICE}.",
                )


def common_images(first: Network, second: Network) -> dict[str, int]:
    """Return the classes of `second` with images that `first` has learned too, and how many.

    Images are compared by their hashes if both models have them. Without hashes, the same files
    and classes with equal statistics are recognised.
    """
    rows = first.hashes.repeated(second.hashes)
    common = {second.classes[row]: count for row, count in rows.items()}
    files = {task.files for task in first.tasks if task.files}
    for task in second.tasks:
        if task.files in files:
            common = {**task.images, **common}
    mine, others = first.detector.class_moments(), second.detector.class_moments()
    for name, count, total in zip(
        second.classes, others.counts.frozen, others.sums.frozen, strict=True
    ):
        same = mine.sums.frozen[mine.counts.frozen == count]
        nearest = (same - total).norm(dim=1).amin() if len(same) else torch.inf
        if count > 0 and nearest <= ROUNDING * total.norm():
            images = sum(task.images.get(name, 0) for task in second.tasks)
            common.setdefault(name, images)
    return common


@contextlib.contextmanager
def _unchanged_on_error(classifier: EditableEstimator, previous: Model) -> Iterator[None]:
    """Restore a version if the block raises."""
    try:
        yield
    except BaseException as error:
        classifier.network.set_state(previous, "the version before")
        if isinstance(error, LinAlgError):
            raise errors.CannotEdit("the statistics of the model contradict each other") from error
        raise


def _edit(
    tasks: Sequence[TaskRecord], what: str, names: Sequence[str], into: str | None = None
) -> EditRecord:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    after = len(tasks)
    return EditRecord(date=date, after_lesson=after, what=what, names=list(names), into=into)
