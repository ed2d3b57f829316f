"""What a user can get wrong. Every message says what happened, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class CodaError(Exception):
    """An error with a remedy. The command line prints it and exits with `exit_code`."""

    exit_code = 2


def listed(names: Iterable[object], most: int = 5) -> str:
    shown = [str(name) for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


class UnknownName(CodaError):
    """An option, method, backbone or field that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"Did you mean '{nearest[0]}'?" if nearest else f"Known: {', '.join(names)}."
        super().__init__(f"There is no {kind} '{name}'. {hint}")


class BadOption(CodaError):
    """An option whose value cannot be used."""

    def __init__(self, owner: str, field: str, problem: str) -> None:
        super().__init__(f"Option '{field}' of {owner}: {problem}.")


class OddPromptLength(CodaError):
    def __init__(self, field: str, length: int) -> None:
        super().__init__(
            f"{field} = {length} is odd, but a prompt splits in halves for keys and values. Use "
            + (f"{length - 1} or {length + 1}." if length > 1 else "2 or more.")
        )


class TooManyBlocks(CodaError):
    def __init__(self, blocks: Sequence[int], depth: int) -> None:
        super().__init__(
            f"Prompts are asked for in blocks {listed(blocks, 20)}, but this ViT has {depth} "
            f"blocks (0 to {depth - 1}). Name blocks below {depth}."
        )


class EmptyTask(CodaError):
    def __init__(self, task: int, reason: str = "has no training image") -> None:
        super().__init__(
            f"Task {task + 1} {reason}. Give every task at least one class with an image, "
            "or use fewer tasks."
        )


class ClassInTwoTasks(CodaError):
    def __init__(self, name: str, first: int, second: int) -> None:
        super().__init__(
            f"Class '{name}' is in task {first + 1} and again in task {second + 1}. In a benchmark "
            "every class belongs to one task: remove it from one of the lists."
        )


class WrongRows(CodaError):
    """Labels of a task that do not fit the classes seen so far."""

    def __init__(self, task: int, problem: str) -> None:
        super().__init__(
            f"Task {task + 1}: {problem}. New classes take the next free rows in order, and every "
            "training label is one of the task's classes."
        )


class NotLearned(CodaError):
    def __init__(self, name: str, rows: Sequence[int]) -> None:
        super().__init__(
            f"{name} has not learned classes {listed(rows)} yet. Learn their task before testing "
            "them."
        )


class UnfinishedTask(CodaError):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is in the middle of a task. Finish it with end_task, or load the saved "
            "method anew."
        )


class MissingData(CodaError):
    def __init__(self, path: object, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}. {remedy}")


class BadImage(CodaError):
    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}. Remove the file or replace it by a readable image.")


class BadImages(CodaError):
    """Every image that cannot be read."""

    def __init__(self, problems: Sequence[BadImage]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} images" if len(problems) > 1 else "An image"
        super().__init__(
            f"{count} cannot be used. Mend or remove them, or pass --skip-bad (skip_bad=True) to "
            "go on without them:\n" + "\n".join(f"  {problem}" for problem in problems)
        )


class CorruptFile(CodaError):
    remedy = "Fetch the file again or restore it from a copy."

    def __init__(self, path: object, problem: str, remedy: str | None = None) -> None:
        self.problem = problem
        super().__init__(f"{path}: {problem}. {remedy or self.remedy}")


class BrokenRun(CorruptFile):
    """Something in a run's folder."""

    remedy = "Remove the folder of this run and run it again."


class KeyMismatch(CodaError):
    """Weights that do not fit the architecture."""

    def __init__(self, path: object, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        parts = [
            f"{kind} {listed(keys)}"
            for kind, keys in (("missing", missing), ("unexpected", unexpected))
            if keys
        ]
        super().__init__(
            f"{path} does not fit the architecture: {'; '.join(parts)}. Name the backbone "
            "these weights belong to, or use another file."
        )


class ShapeMismatch(CodaError):
    def __init__(
        self, path: object, key: str, found: Sequence[int], expected: Sequence[int]
    ) -> None:
        super().__init__(
            f"{path}: '{key}' has shape {tuple(found)}, the architecture has {tuple(expected)}. "
            "Name the backbone these weights belong to, or use another file."
        )


class UnknownArchitecture(CodaError):
    def __init__(self, path: object, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}. Say which named backbone it is built like (see 'coda backbones')."
        )


class BackboneUnavailable(CodaError):
    def __init__(self, name: str, address: str, folder: object, cause: str) -> None:
        super().__init__(
            f"The weights of '{name}' could not be fetched ({cause}). Get the file {address} on a "
            f"machine with a network and either copy its hub cache folder to {folder} or pass the "
            "path of the .safetensors file instead of the name. The embedded backbone 'pocket' "
            "needs no download."
        )


class HashMismatch(CodaError):
    def __init__(self, what: str, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{what} has sha256 {found[:16]}…, expected {expected[:16]}…. {remedy}")


class WrongBackbone(CodaError):
    def __init__(self, path: object, expected: str, found: str) -> None:
        super().__init__(
            f"{path} was learned on a backbone with hash {expected[:16]}…, but the one given has "
            f"{found[:16]}…. Load it with the backbone it was learned on."
        )


class NonFiniteLoss(CodaError):
    def __init__(self, task: int, epoch: int, step: int) -> None:
        super().__init__(
            f"The loss or its gradient is not finite in task {task + 1}, epoch {epoch + 1}, step "
            f"{step + 1}. The model was put back to what it was before this task. Lower the "
            "learning rate, or look for bad values in the images."
        )


class BadMethod(CodaError):
    def __init__(self, spec: str, problem: str) -> None:
        super().__init__(
            f"'{spec}' cannot be used as a method: {problem}. Write it as path/to/file.py:Class, "
            "with a class derived from coda_prompt.methods.Method."
        )


class MissingExtra(CodaError):
    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs packages that are not installed. Install them with: "
            f"pip install 'coda-prompt[{extra}]'."
        )


class ModelBusy(CodaError):
    def __init__(self, folder: object, owner: str) -> None:
        super().__init__(
            f"{folder} is being changed by another process (pid {owner}). Wait until it has "
            "finished; predictions go on meanwhile."
        )


class ModelChanged(CodaError):
    def __init__(self, folder: object) -> None:
        super().__init__(
            f"{folder} was changed by others since this classifier was read from it or saved to "
            "it. Load it again and repeat what you learned, or save to another folder."
        )


class LearnedBefore(CodaError):
    """Not a mistake: the command had done its work before it was cut off."""

    exit_code = 0

    def __init__(self, folder: object) -> None:
        super().__init__(
            f"{folder}: an earlier run of this command had learned these images and was cut off "
            "while saving. The save is complete now; nothing was learned twice."
        )


class UnfinishedLesson(CodaError):
    def __init__(self, folder: object) -> None:
        super().__init__(
            f"A lesson of other images or options was interrupted, and what it had done is kept in "
            f"{folder}. Finish it with the command that began it, or remove that folder to give it "
            "up."
        )


class NothingToUndo(CodaError):
    def __init__(self, what: object) -> None:
        super().__init__(
            f"{what} has no earlier version to go back to: the one before the newest task is kept, "
            "and no more."
        )


class NotTaught(CodaError):
    def __init__(self, unknown: Sequence[str], known: Sequence[str]) -> None:
        if not known:
            super().__init__("The classifier has not learned any class yet. Call learn first.")
        else:
            super().__init__(
                f"The classifier does not know {listed(unknown)}. Leave them out, or learn them "
                f"first; it knows {len(known)} classes: {listed(known)}."
            )


class HubProblem(CodaError):
    def __init__(self, name: str, what: str, cause: object) -> None:
        reason = " ".join(str(cause).split())
        super().__init__(
            f"The model '{name}' could not be {what} ({reason[:300]}). Check the name "
            "(owner/model), the network and your token ('hf auth login')."
        )


class LostWorker(CodaError):
    def __init__(self, cause: str) -> None:
        super().__init__(
            f"A process that ran part of the benchmark died ({cause}; a kill often means that "
            "memory ran out). Finished runs are kept: start the same command again, with fewer at "
            "a time if memory was short."
        )


class LostLoader(CodaError):
    def __init__(self, cause: str) -> None:
        super().__init__(
            f"A process that reads images died ({cause}; a kill often means that memory ran out). "
            "What was done is kept: run the same command again, with fewer training.workers if "
            "memory was short."
        )


class LostProcess(CodaError):
    """Of a training on several devices."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(
            reason
            or "A process of this training died (a kill often means that memory ran out). What was "
            "done is kept: run the same command again."
        )


class Interrupted(CodaError):
    """Stopped by Ctrl-C or a polite kill, with everything kept."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("Interrupted. What was done is kept: run the same command to go on.")


class RunBusy(CodaError):
    def __init__(self, folder: object, owner: str) -> None:
        super().__init__(
            f"{folder} is being run by another process (pid {owner}). Wait until it has finished, "
            "or use another folder."
        )


class ChangedRun(CodaError):
    def __init__(self, folder: object, differences: Sequence[str]) -> None:
        super().__init__(
            f"{folder} holds a run with another configuration ({listed(differences)}). Use "
            "another folder for this one, or remove the old one."
        )
