"""Errors a user can meet. Each message says what happened and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

UNKNOWN_FIELD = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls it in models and in dataclasses."""


class CodaError(Exception):
    """Base class. The command line prints the message and exits with `exit_code`."""

    exit_code = 2


class CodaWarning(UserWarning):
    """Something to check: doubtful images or class names, files that are skipped."""


def join_names(names: Iterable[object], limit: int = 5) -> str:
    """Join names with commas; after `limit` names: "a, b and 3 more"."""
    texts = [str(name) for name in names]
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 lesson`, `3 classes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None if none is similar."""
    names = sorted(known)
    longer = [each for each in names if name and each.lower().startswith(name.lower())]
    similar = longer or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return similar[0] if similar else None


class UnknownName(CodaError):
    """An option, method, backbone or field that does not exist.

    Args:
        kind: What the name stands for.
        name: What the user wrote.
        known: All names there are.
        owner: What should have it, such as a method or a file.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], owner: str = "") -> None:
        names = sorted(known)
        nearest = nearest_name(name, names)
        hint = f"Did you mean '{nearest}'?" if nearest else f"Choose one of: {', '.join(names)}."
        where = f" in {owner}" if owner else ""
        super().__init__(f"There is no {kind} '{name}'{where}. {hint}")


class BadOption(CodaError):
    """An option has a value that cannot be used; `owner` may be empty."""

    def __init__(self, owner: str, field: str, problem: str) -> None:
        where = f" of {owner}" if owner else ""
        super().__init__(f"Option '{field}'{where}: {problem}.")


class BadClassName(BadOption, ValueError):
    """A text cannot be the name of a class."""

    def __init__(self, text: str) -> None:
        shown = ascii(text[:40] + ("…" if len(text) > 40 else ""))
        CodaError.__init__(
            self,
            f"{shown} cannot be the name of a class: use visible characters, on one line, without "
            "control characters.",
        )


def bad_field(
    owner: str,
    error: ValidationError,
    known: Mapping[str, Iterable[str]],
    kind: str = "field",
    whole: str = "?",
) -> BadOption | UnknownName:
    """Turn the errors of pydantic into an exception that names one field.

    Args:
        owner: What was validated.
        known: Names of all fields under "", and those of sections under the section's name.
        kind: What a field is called.
        whole: The field to name if several contradict each other.
    """
    # Unknown fields come first: a misspelled field is reported as missing as well.
    first = min(error.errors(), key=lambda each: each["type"] not in UNKNOWN_FIELD)
    parts = [str(part) for part in first["loc"]]
    if first["type"] in UNKNOWN_FIELD:
        path = ".".join(parts)
        section, dot, _ = path.rpartition(".")
        fields = known.get(path.split(".")[0] if dot else "", known[""])
        return UnknownName(kind, path, [f"{section}{dot}{field}" for field in fields], owner)
    while parts and not parts[-1].isidentifier():  # an element, or an alternative of a union
        parts.pop()
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "greater_than_equal":
        least = first["ctx"]["ge"]
        problem = f"{first['input']} is " + (f"less than {least}" if least else "negative")
    return BadOption(owner, ".".join(parts) or whole, problem[:1].lower() + problem[1:])


class WrongType(CodaError, TypeError):
    """A value of a type that cannot be used."""

    def __init__(self, value: object, what: str, accepted: str) -> None:
        super().__init__(f"{type(value).__name__} cannot be used as {what}. Accepted: {accepted}.")


class EmptyTask(CodaError):
    def __init__(self, task: int, reason: str = "has no training image") -> None:
        super().__init__(
            f"Task {task + 1} {reason}. Give every task at least one class with an image, "
            "or use fewer tasks."
        )


class ClassInTwoTasks(CodaError):
    def __init__(self, name: str, first: int, second: int) -> None:
        super().__init__(
            f"Class '{name}' is in task {first + 1} and in task {second + 1}. In a benchmark every "
            "class belongs to one task: remove it from one of them."
        )


class InvalidLabels(CodaError):
    """The labels of a task do not fit the classes learned so far."""

    def __init__(self, task: int, problem: str) -> None:
        super().__init__(
            f"Task {task + 1}: {problem}. New classes take the next free rows in order, and every "
            "training label is one of the task's classes."
        )


class NotLearned(CodaError):
    """A class is evaluated or named before it was learned."""

    def __init__(
        self, classes: Sequence[object], known: Sequence[str], name: str = "The classifier"
    ) -> None:
        if not classes:
            super().__init__(f"{name} has not learned any class yet. Call learn first.")
        else:
            known_classes = f" It knows {len(known)}: {join_names(known)}." if known else ""
            nearest = nearest_name(str(classes[0]), known) if len(classes) == 1 else None
            advice = "Check the spelling, learn these classes first, or leave them out."
            if nearest is not None:
                advice = f"Did you mean '{nearest}'?"
            super().__init__(
                f"{name} has not learned {join_names(classes)}. {advice}{known_classes}"
            )


class UnfinishedTask(CodaError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is in the middle of a task. Call end_task first, or reload the saved method."
        )


class MissingData(CodaError):
    """A file, folder or dataset does not exist or is incomplete."""

    def __init__(self, path: object, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}. {remedy}")


class WrongFolder(MissingData):
    """A folder of class folders was expected, and they are elsewhere.

    Args:
        folder: What was named.
        problem: What is wrong with it.
        remedy: What to do, besides naming another folder.
        instead: The folders to name.
    """

    def __init__(
        self, folder: object, problem: str, remedy: str, instead: Sequence[object]
    ) -> None:
        self.folder, self.instead = str(folder), [str(each) for each in instead]
        named = join_names(self.instead)
        remedy = f"Name the folder with the classes: {named}. {remedy}".rstrip()
        super().__init__(folder, problem, remedy)


class BadImage(CodaError):
    def __init__(
        self,
        path: object,
        problem: str,
        remedy: str = "Remove the file or replace it with a readable image.",
    ) -> None:
        super().__init__(f"{path}: {problem}. {remedy}")


class BadImages(CodaError):
    """All images of a dataset that cannot be read."""

    def __init__(self, problems: Sequence[CodaError]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} images" if len(problems) > 1 else "An image"
        super().__init__(
            f"{count} cannot be used. Correct this, or skip such images with --skip-bad "
            "(skip_bad=True):\n" + "\n".join(f"  {problem}" for problem in problems)
        )


class CorruptFile(CodaError):
    """A file has unexpected content."""

    remedy = "Download the file again or restore it from a backup."

    def __init__(self, path: object, problem: str, remedy: str | None = None) -> None:
        self.problem = problem
        super().__init__(f"{path}: {problem}. {remedy or self.remedy}")


class TooLong(CodaError):
    """A description is so long that the file would be refused when it is read."""

    def __init__(self, actual: int, most: int) -> None:
        super().__init__(
            f"The description of lessons and edits would have {actual:,} bytes, and a model of "
            f"this size can have {most:,}. Learn further classes in a new model."
        )


class CorruptRun(CorruptFile):
    """A file in a run folder has unexpected content."""

    remedy = "Delete the run folder and run the benchmark again."


class WeightsMismatch(CodaError):
    """Weights do not fit the architecture, or fit none that is known."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}. Specify the backbone these weights belong to as NAME={path} (see "
            "'coda backbones'), or use another file."
        )


class BackboneUnavailable(CodaError):
    """The weights of a backbone cannot be downloaded."""

    def __init__(self, name: str, url: str, folder: object, cause: str) -> None:
        super().__init__(
            f"The weights of '{name}' could not be downloaded ({cause}). Download {url} on a "
            f"machine with internet access and use the file: --backbone {name}=PATH. Or copy its "
            f"Hugging Face cache folder to {folder}. The built-in backbones 'pocket' and 'photo' "
            "need no download."
        )


class HashMismatch(CodaError):
    def __init__(self, what: str, expected: str, actual: str, remedy: str) -> None:
        super().__init__(f"{what} has sha256 {actual[:16]}…, expected {expected[:16]}…. {remedy}")


class BackboneMismatch(CodaError):
    def __init__(self, path: object, expected: str, actual: str) -> None:
        super().__init__(
            f"{path} was trained on a backbone with hash {expected[:16]}…, but this backbone has "
            f"hash {actual[:16]}…. Load the model with the backbone it was trained on."
        )


class NonFiniteLoss(CodaError):
    def __init__(self, task: int, epoch: int, step: int) -> None:
        super().__init__(
            f"The loss or its gradient is not finite in task {task + 1}, epoch {epoch + 1}, step "
            f"{step + 1}. The model was restored to its state before this task. Lower the learning "
            "rate, or check the images for extreme values."
        )


METHOD_MODULE = "coda_prompt_method_"
"""Start of the names of modules that are loaded from files of users."""


class BadMethod(CodaError):
    def __init__(self, spec: str, problem: str) -> None:
        super().__init__(f"'{spec}' cannot be used as a method: {problem}.")


class MissingExtra(CodaError):
    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs packages that are not installed. Install them with: "
            f"pip install 'coda-prompt[{extra}]'."
        )


class FolderBusy(CodaError):
    """Another process is writing to a model or run folder."""

    def __init__(self, folder: object, owner: str) -> None:
        super().__init__(
            f"{folder} is in use by another process (pid {owner}). Wait until it has finished, or "
            "use another folder."
        )


class CannotEdit(CodaError):
    """What was taught cannot be changed as asked."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"Not possible: {reason}.{remedy and f' {remedy}'}")


class ModelChanged(CodaError):
    def __init__(self, folder: object) -> None:
        super().__init__(
            f"{folder} was changed by another process after this classifier was loaded from it or "
            "saved to it. Load it again and repeat the lesson, or save to another folder."
        )


class UnfinishedLesson(CodaError):
    def __init__(self, folder: object) -> None:
        super().__init__(
            f"An interrupted lesson with other images or options has a checkpoint in {folder}. "
            "Finish it by running the same command again, or delete that folder to discard it."
        )


class NothingToUndo(CodaError):
    def __init__(self, what: object, number: int | None = None, *, redo: bool = False) -> None:
        kind = "later" if redo else "earlier"
        wanted = f"no {kind} version" if number is None else f"no version {number}"
        super().__init__(
            f"{what} has {wanted} to restore. The last ten versions are stored: 'coda history' "
            "lists them."
        )


class HubError(CodaError):
    """A model cannot be downloaded from or uploaded to the Hugging Face Hub."""

    def __init__(self, name: str, action: str, cause: object) -> None:
        reason = " ".join(str(cause).split())
        super().__init__(
            f"The model '{name}' could not be {action} ({reason[:300]}). Check the name "
            "(owner/model), the network and your token ('hf auth login')."
        )


class ProcessDied(CodaError):
    """A worker process of a training, benchmark or data loader died."""

    def __init__(self, task: str, cause: str, fix_memory: str = "") -> None:
        """`fix_memory`: how to use less memory, for example "with fewer --jobs"."""
        retry = f", {fix_memory} if memory was short" if fix_memory else ""
        super().__init__(
            f"A process that {task} died ({cause}; a killed process often ran out of memory). "
            f"Progress is saved: run the same command again{retry}."
        )


class Interrupted(CodaError):
    """Stopped by Ctrl-C or SIGTERM; progress is saved."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("Interrupted. Progress is saved: run the same command again to resume.")


class RunConfigChanged(CodaError):
    def __init__(self, folder: object, differences: Sequence[str]) -> None:
        super().__init__(
            f"{folder} contains a run with a different configuration ({join_names(differences)}). "
            "Use another folder, or delete the old run."
        )
