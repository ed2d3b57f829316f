"""Edit what was taught: rename, merge, forget and relabel classes, and join models.

An edit makes a new model of another one. Where the method has sums over images, it changes them;
the records of lessons always follow.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from coda_prompt import errors
from coda_prompt.console import class_name
from coda_prompt.images.labelled import Labelled
from coda_prompt.learner import held_out
from coda_prompt.learner.folder import Version, Versions
from coda_prompt.learner.lesson import LessonOptions, read_images
from coda_prompt.learner.model import CONTRADICTION, PROMPTED, LearnedModel, check_values
from coda_prompt.learner.records import Description, EditRecord, TaskRecord
from coda_prompt.statistics.classifier import Classifier

COUNT_TWICE = "join them anyway with --count-twice (count_twice=True)"
ROUNDING = 1e-4
"""Of the sum of a class's features. Sums of the same images differ less, other images more."""
NOTHING_REMAINS = "nothing of it remains in the sums"


@dataclass(frozen=True)
class Forgotten:
    """What `forget` removed."""

    name: str
    images: int
    """Images of the class that had been taught."""
    versions: int
    """Stored versions that had the class and were rewritten."""
    remains: str
    """What of the class remains in sums over all classes."""


def renamed(model: LearnedModel, old: str, new: str) -> LearnedModel:
    """Give a class another name; `ContinualClassifier.rename` documents it."""
    old, new = known_name(model, old), class_name(new)
    _check_free(model, new, ())
    tasks = rewritten(model.tasks, {old: new})
    edit = _edit(tasks, f"renamed {old} to {new}", [old], new)
    return replace(model, tasks=tuple(tasks), edits=(*model.edits, edit))


def with_united_classes(model: LearnedModel, names: Sequence[str], into: str) -> LearnedModel:
    """Merge classes; `ContinualClassifier.merge_classes` documents it."""
    names, into = [known_name(model, name) for name in names], class_name(into)
    rows = sorted({model.classes.index(name) for name in names})
    if len(rows) < 2:
        raise errors.CannotEdit("two different classes are needed to merge them")
    _check_free(model, into, names)
    with _solvable():
        united = _changed(model, "united", rows, rows[0])
        tasks = rewritten(model.tasks, dict.fromkeys(names, into))
        what = f"merged {errors.join_names(names)} into {into}"
        return united.with_lessons(tasks, _edit(tasks, what, names, into))


def forgotten(
    model: LearnedModel, versions: Versions, name: str
) -> tuple[LearnedModel, Versions, Forgotten]:
    """Remove a class from a model and all its versions; `ContinualClassifier.forget` documents it.

    Args:
        model: The current version.
        versions: Those before and after it.
        name: The class.

    Returns:
        The model without the class, the versions without it, and what was removed. The model is
        not one of the versions yet.
    """
    name = known_name(model, name)
    if len(model.classes) == 1:
        raise errors.CannotEdit("it is the only class", "Delete the model folder instead.")
    _check_additive(model)
    images = sum(task.images.get(name, 0) for task in model.tasks)
    remains = _what_remains(model, name)
    before, rewritten_versions = [], len(versions.after)
    with _solvable():
        for version in versions.before:
            earlier = LearnedModel.of_file(
                *version.read(), model.encoder, f"version {version.number}"
            )
            without = _without(earlier, names_in(earlier, model, name))
            rewritten_versions += without is not earlier
            if without is earlier:
                before.append(version)
            elif without is not None:
                before.append(Version.of(without.description(), without.arrays()))
        now = _without(model, {name})
    assert now is not None
    kept = Versions(tuple(before), versions.current)
    return now, kept, Forgotten(name, images, rewritten_versions, remains)


def relabelled(
    model: LearnedModel, images: Labelled, taught_as: str
) -> tuple[LearnedModel, dict[str, int]]:
    """Move images to the right classes; `ContinualClassifier.relabel` documents it."""
    taught_as = known_name(model, taught_as)
    source, counts = model.classes.index(taught_as), images.counts()
    if taught_as in counts:
        raise errors.CannotEdit(f"the images of {taught_as} have the name they were taught as")
    taught = sum(task.images.get(taught_as, 0) for task in model.tasks)
    if sum(counts.values()) >= taught:
        raise errors.CannotEdit(
            f"{taught_as} was taught with {errors.counted(taught, 'image')}, and "
            f"{sum(counts.values())} would leave",
            "Use rename or merge-classes for a whole class.",
        )
    _check_additive(model)
    new = [name for name in images.names if name not in model.classes]
    names = [*model.classes, *new]
    rows = np.array([names.index(name) for name in images.names])[images.split.labels]
    hashing = bool(len(model.hashes))
    read = read_images(model.encoder, model.prompts, images, LessonOptions(), hashing=hashing)
    tasks = _relabelled(model.tasks, taught_as, counts, new)
    what = f"relabelled {errors.counted(len(rows), 'image')} of {taught_as}"
    assert isinstance(model.classifier, Classifier)
    try:
        moved = replace(
            model,
            classifier=model.classifier.moved(read.features, source, rows),
            detector=model.detector.moved(read.plain, source, rows),
            hashes=model.hashes.moved(read.hashes, source, rows) if hashing else model.hashes,
        )
        edit = _edit(tasks, what, [taught_as, *images.names])
        done = moved.with_lessons(tasks, edit)
        done.scorer  # noqa: B018 (raises if its statistics contradict each other)
        return done, counts
    except (LinAlgError, errors.CorruptFile) as error:  # classes would have negative variances
        raise errors.CannotEdit(
            f"these images were not taught as {taught_as}", "Give only images that were."
        ) from error


def joined(models: Sequence[LearnedModel], *, count_twice: bool = False) -> LearnedModel:
    """Join what several models have learned; `ContinualClassifier.merge` documents it.

    The first one has the encoder; nothing that the others name is opened.
    """
    if len(models) < 2:
        raise errors.CannotEdit("two or more models are needed")
    first, *others = models
    for other in others:
        check_mergeable(first, other.description())
    if not count_twice:
        _refuse_common_images(models)
    with _solvable():
        for other in others:
            tasks = rewritten([*first.tasks, *other.tasks], {})
            names = [name for task in tasks for name in task.new]
            rows = [names.index(name) for name in other.classes]
            assert isinstance(first.classifier, Classifier)
            assert isinstance(other.classifier, Classifier)
            first = replace(
                first,
                classifier=first.classifier.joined(other.classifier, rows),
                detector=first.detector.joined(other.detector, rows),
                hashes=first.hashes.joined(other.hashes, rows),
                tasks=tuple(tasks),
                options=first.options if other.options.integers else other.options,
            )
        edit = _edit(first.tasks, f"joined {len(models)} models", [])
        first = first.with_lessons(first.tasks, edit)
        check_values(first.arrays(), "The joined model")
        first.scorer  # noqa: B018 (raises if its statistics contradict each other)
    return first


def known_name(model: LearnedModel, text: str) -> str:
    """Return the name of a class in the spelling of the model.

    Raises:
        NotLearned: There is no such class.
    """
    name = class_name(text)
    if name not in model.classes:
        raise errors.NotLearned([name], model.classes)
    return name


def _changed(model: LearnedModel, change: str, *arguments: Any) -> LearnedModel:
    """Make the same change to everything that adds up over images.

    Raises:
        CannotEdit: What the method has learned is not a sum over images.
    """
    _check_additive(model)
    parts = {name: getattr(model, name) for name in ("classifier", "detector", "hashes")}
    return replace(
        model, **{name: getattr(part, change)(*arguments) for name, part in parts.items()}
    )


def _check_additive(model: LearnedModel) -> None:
    if not model.additive:
        raise errors.CannotEdit(
            f"{model.method} is trained by gradients on all images of a lesson together: single "
            "classes cannot be edited afterwards",
            "Undo the lesson and teach the corrected images, or use ranpac, slda or ncm "
            "(to merge or forget classes, also coda-p-ranpac).",
        )


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


def names_in(version: LearnedModel, current: LearnedModel, name: str) -> set[str]:
    """Return the names in another version of a class of the current version.

    Args:
        version: An earlier or undone version.
        current: The current version.
        name: A class of the current version. If it was merged from several classes, these are
            returned for versions before that; if it was merged with others in an undone version,
            the class they became is returned.
    """
    names, own = {name}, version.edits
    for edit in reversed([edit for edit in current.edits if edit not in own]):
        if edit.into in names:
            names = (names - {edit.into}) | set(edit.names)
        elif edit.into is not None:  # the old names belonged to other classes then
            names -= set(edit.names)
    for edit in own:
        if edit not in current.edits and edit.into and names & set(edit.names):
            names = (names - set(edit.names)) | {edit.into}
    return names & set(version.classes)


def _without(model: LearnedModel, names: Collection[str]) -> LearnedModel | None:
    """Return a version without some classes, itself if it has none; None if it has no other."""
    aliases, mentioned = set(names), list[EditRecord]()
    for edit in reversed(model.edits):
        if aliases & {*edit.names, edit.into}:
            mentioned.append(edit)
            aliases |= set(edit.names) if edit.into in aliases else set()
    if not names and not mentioned:
        return model
    if len(model.classes) == len(names):
        return None
    rows = [model.classes.index(name) for name in names]
    without = _changed(model, "without_classes", rows) if rows else model
    tasks = rewritten(model.tasks, dict.fromkeys(names))
    edits = [edit for edit in model.edits if edit not in mentioned]
    edits.append(_edit(tasks, "forgot a class", []))  # its name is not recorded
    return replace(without, edits=tuple(edits)).with_lessons(tasks)


def _what_remains(model: LearnedModel, name: str) -> str:
    """Say what of a class `forget` cannot remove."""
    if model.options.removable:
        return NOTHING_REMAINS
    remains = (
        "its name, mean and count are removed; the scatter of its images around their mean remains "
        "in the covariance that all classes share (use --removable for a model without this)"
    )
    if model.trained and name in model.tasks[0].new:
        remains += ", and the prompts were trained on its images"
    return remains


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


def _check_free(model: LearnedModel, name: str, own: Sequence[str]) -> None:
    if name in model.classes and name not in own:
        remedy = "Merge the classes with merge-classes, or choose another name."
        raise errors.CannotEdit(f"a class '{name}' already exists", remedy)


def check_mergeable(model: LearnedModel, other: Description) -> None:
    """Check from its description alone that the sums of a model are of the same features.

    Raises:
        CannotEdit: They are not.
    """
    _check_additive(model)
    if model.method in PROMPTED:
        raise errors.CannotEdit(
            "each of these models has learned prompts of its own, and sums of "
            "differently prompted features do not add up"
        )
    pairs = {
        "method": (model.method, other.method),
        "backbone": (model.backbone.fingerprint[:16], other.backbone.fingerprint[:16]),
        "option 'removable'": (model.options.removable, other.options.removable),
        "seed": (model.options.seed, other.options.seed),
    }
    for what, (mine, others) in pairs.items():
        if mine != others:
            raise errors.CannotEdit(f"the models differ in their {what}: {mine} and {others}")


def _refuse_common_images(models: Sequence[LearnedModel]) -> None:
    """Refuse models that have learned the same images, which would count twice."""
    lessons = [task for each in models for task in each.tasks]
    for index, lesson in enumerate(lessons):
        if lesson in lessons[:index] and lesson.images:
            raise errors.CannotEdit(
                f"two models have the lesson of {lesson.date} ({errors.join_names(lesson.new)}) in "
                "common, and its images would count twice",
                f"Undo it in one of them, or {COUNT_TWICE}.",
            )
    for index, later in enumerate(models):
        for earlier in models[:index]:
            if common := common_images(earlier, later):
                each = [f"{name} {count}" for name, count in common.items()]
                total = errors.counted(sum(common.values()), "image")
                raise errors.CannotEdit(
                    f"both models have learned the same images ({errors.join_names(each)}), and "
                    f"{total} would count twice",
                    f"Forget these classes in one of them, or {COUNT_TWICE}.",
                )


def common_images(first: LearnedModel, second: LearnedModel) -> dict[str, int]:
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
    mine, others = first.detector.moments, second.detector.moments
    for name, count, total in zip(second.classes, others.counts, others.sums, strict=True):
        same = mine.sums[mine.counts == count]
        nearest = np.linalg.norm(same - total, axis=1).min() if len(same) else np.inf
        if count > 0 and nearest <= ROUNDING * np.linalg.norm(total):
            common.setdefault(name, sum(task.images.get(name, 0) for task in second.tasks))
    return common


@contextlib.contextmanager
def _solvable() -> Iterator[None]:
    """Say what it means that sums cannot be solved."""
    try:
        yield
    except LinAlgError as error:
        raise errors.CannotEdit(f"the model cannot be edited: {CONTRADICTION}") from error


def _edit(
    tasks: Sequence[TaskRecord], what: str, names: Sequence[str], into: str | None = None
) -> EditRecord:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    after = len(tasks)
    return EditRecord(date=date, after_lesson=after, what=what, names=list(names), into=into)
