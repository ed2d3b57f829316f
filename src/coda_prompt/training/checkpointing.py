"""A training on disk, so that one that was stopped, however, goes on and ends with the same bits.

    checkpoint-000017.json       where it stood and the hash of every file it needs
    learned-000015.safetensors   what a finished task changed in the learned state
    training-000017.safetensors  parameters and optimizer in the midst of a task

Files are written under other names, flushed and renamed, the checkpoint last; the last two are
kept, and the newest that is whole counts. Randomness needs no keeping: it is keyed by seed, task,
epoch and image.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from coda_prompt.errors import CorruptFile, Interrupted
from coda_prompt.methods import Method
from coda_prompt.storage.files import FileSchema, write_atomically
from coda_prompt.storage.tensors import read_tensors, stated_sha256, tensors_sha256, write_tensors
from coda_prompt.training.settings import Event

log = logging.getLogger(__name__)

FORMAT = 1
KEPT = 2
CHECKPOINT = "checkpoint-{:06}.json"
LEARNED, TRAINING = "learned-{:06}.safetensors", "training-{:06}.safetensors"
FILE_NAME = r"^(learned|training)-[0-9]{6,12}\.safetensors$"
CHECKPOINT_NAME = re.compile(r"checkpoint-([0-9]{6,8})\.json")
OWN_NAME = re.compile(
    r"\.?(checkpoint-[0-9]{6,9}\.json|(learned|training)-[0-9]{6,12}\.safetensors)(\.[0-9]+\.tmp)?"
)
"""Of its files, and of those that are being written."""


class TensorFile(FileSchema):
    name: str = Field(pattern=FILE_NAME)
    sha256: str
    size: int = Field(ge=0)
    appended: list[str]
    """Tensors in it that go behind what earlier files have; the others stand for themselves."""


class Checkpoint(FileSchema):
    """Where a training stood: tasks done, and steps done of the one at hand."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    identity: Any
    """What the training was told; another one does not go on from here."""
    task: int = Field(ge=0)
    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    losses: list[float]
    """Of the epochs done in this task."""
    sum_of_losses: float
    """Of the steps done in this epoch."""
    learned: list[TensorFile]
    training: TensorFile | None
    notes: dict[str, Any]
    """The caller's own, as of then."""


@dataclass
class Going:
    """A task's training between two steps."""

    epoch: int = 0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    sum_of_losses: float = 0.0


class Checkpointer:
    """Keeps one training in a folder; `found` is where an earlier one stopped."""

    def __init__(
        self,
        folder: Path,
        identity: Any,
        *,
        every: float = 60.0,
        writes: bool = True,
        stop: Callable[[], bool] = lambda: False,
        notes: Callable[[], dict[str, Any]] = dict,
        kept: Callable[[], object] = lambda: None,
    ) -> None:
        """`every`: seconds between checkpoints within an epoch. `stop`: whether to stop now.
        `kept`: called when a checkpoint is there.

        Of several processes of a training, one `writes`; all go on from what it wrote.
        """
        if folder.is_symlink():
            raise CorruptFile(folder, "is a link to elsewhere", "Remove it.")
        self.folder, self.identity, self.every = folder, identity, every
        self.writes = writes
        self.other: Checkpoint | None = None
        """The newest whole one, where it is of another training."""
        self._stop, self._notes, self._kept = stop, notes, kept
        self._learned: list[TensorFile] = []
        self._prefixes: dict[str, tuple[tuple[int, ...], str]] = {}
        """Of each tensor that grows, the shape and hash of what is on disk."""
        self._number = 0
        self._saved = time.monotonic()
        self.found = self._newest()
        if self.found is not None:
            self._learned = list(self.found.learned)

    # -- going on

    def restore_learned(self, method: Method) -> None:
        """Put back what the tasks before the one at hand had learned."""
        state: dict[str, Tensor] = {}
        for file in self._learned:
            for name, tensor in self._tensors(file).items():
                if name in file.appended:
                    try:
                        tensor = torch.cat([state[name], tensor], method.grows[name])
                    except (KeyError, RuntimeError, IndexError) as error:
                        problem = f"'{name}' does not continue what is there"
                        raise CorruptFile(self.folder / file.name, problem) from error
                state[name] = tensor
        if state:
            method.load_learned_state(state)
            self._remember(method, state)

    def restore_training(self, method: Method, optimizer: torch.optim.Optimizer) -> Going:
        """Put back parameters and optimizer where a task was stopped within."""
        found, self.found = self.found, None
        if found is None or found.training is None:
            return Going()
        if len(found.losses) != found.epoch:
            raise CorruptFile(self.folder, "a checkpoint in it counts other epochs than it has")
        tensors = self._tensors(found.training)
        parameters = {name: held for name, held in method.named_parameters() if held.requires_grad}
        state = optimizer.state_dict()
        for number, (name, parameter) in enumerate(parameters.items()):
            kept = tensors.pop(f"parameter.{name}", None)
            if kept is None or not _like(kept, parameter):
                problem = f"it does not fit the parameter '{name}'"
                raise CorruptFile(self.folder / found.training.name, problem)
            parameter.data.copy_(kept)
            start = f"optimizer.{number}."
            own = {
                key.removeprefix(start): tensors[key] for key in tensors if key.startswith(start)
            }
            if own and not _of_adam(own, parameter):
                problem = f"its optimizer does not fit the parameter '{name}'"
                raise CorruptFile(self.folder / found.training.name, problem)
            if own:
                state["state"][number] = own
        optimizer.load_state_dict(state)
        return Going(found.epoch, found.step, list(found.losses), found.sum_of_losses)

    # -- keeping

    def after_task(self, method: Method, task: int) -> None:
        """A task is done and measured: what it changed in the learned state, and nothing else."""
        if not self.writes:
            return
        state = {name: held.detach().cpu() for name, held in method.learned_state().items()}
        changed, appended = {}, []
        for name, tensor in state.items():
            before = self._prefixes.get(name)
            axis = method.grows.get(name)
            if before is not None and axis is not None:
                shape, digest = before
                head = tensor.narrow(axis, 0, min(shape[axis], tensor.shape[axis]))
                if tuple(head.shape) == shape and tensors_sha256({name: head}) == digest:
                    changed[name] = tensor.narrow(
                        axis, shape[axis], tensor.shape[axis] - shape[axis]
                    )
                    appended.append(name)
                    continue
            changed[name] = tensor
        self._remember(method, state)
        if 2 * _size(changed) > _size(state):  # little would be saved: the chain starts anew
            changed, appended, self._learned = state, [], []
        file = self._write(LEARNED.format(self._number + 1), changed, appended)
        self._learned = [*self._learned, file]
        self._write_checkpoint(task + 1, Going(), None)

    def after_step(
        self, method: Method, optimizer: torch.optim.Optimizer, task: int, going: Going
    ) -> None:
        """A step is done: kept where it is time, an epoch ends, or all is to stop."""
        stop = self._stop()
        due = stop or going.step == 0 or time.monotonic() - self._saved >= self.every
        if due and self.writes:
            self._keep_training(method, optimizer, task, going)
        if stop:
            raise Interrupted

    def remove(self) -> None:
        """The training is done; nothing of it is needed any more."""
        if not self.writes:
            return
        for path in self._own_files():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others may have put something there
            self.folder.rmdir()

    def _keep_training(
        self, method: Method, optimizer: torch.optim.Optimizer, task: int, going: Going
    ) -> None:
        tensors = {
            f"parameter.{name}": parameter.detach()
            for name, parameter in method.named_parameters()
            if parameter.requires_grad
        }
        for number, own in optimizer.state_dict()["state"].items():
            for key, value in own.items():
                tensors[f"optimizer.{number}.{key}"] = torch.as_tensor(value)
        file = self._write(TRAINING.format(self._number + 1), tensors, [])
        self._write_checkpoint(task, going, file)

    def _remember(self, method: Method, state: Mapping[str, Tensor]) -> None:
        self._prefixes = {
            name: (tuple(state[name].shape), tensors_sha256({name: state[name]}))
            for name in method.grows
            if name in state
        }

    def _write(self, name: str, tensors: Mapping[str, Tensor], appended: list[str]) -> TensorFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        write_tensors(path, tensors, {})
        digest, size = stated_sha256(path), path.stat().st_size
        assert digest is not None
        return TensorFile(name=name, sha256=digest, size=size, appended=appended)

    def _tensors(self, file: TensorFile) -> dict[str, Tensor]:
        return read_tensors(self.folder / file.name).tensors

    def _write_checkpoint(self, task: int, going: Going, training: TensorFile | None) -> None:
        self._number += 1
        checkpoint = Checkpoint(
            format=FORMAT,
            identity=self.identity,
            task=task,
            epoch=going.epoch,
            step=going.step,
            losses=list(going.losses),
            sum_of_losses=going.sum_of_losses,
            learned=self._learned,
            training=training,
            notes=self._notes(),
        )
        text = checkpoint.model_dump_json()
        whole = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})
        write_atomically(self.folder / CHECKPOINT.format(self._number), whole.encode())
        self._saved = time.monotonic()
        self._tidy()
        self._kept()

    def _tidy(self) -> None:
        """Remove what no kept checkpoint needs."""
        newest = self._checkpoints()[-KEPT:]
        needed = {path.name for path in newest}
        for path in newest:
            held = self._read(path)
            if isinstance(held, Checkpoint):
                files = [*held.learned, *([held.training] if held.training else [])]
                needed |= {file.name for file in files}
        for path in self._own_files():
            if path.name not in needed:
                path.unlink(missing_ok=True)

    # -- finding

    def _newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole and of this training."""
        paths = self._checkpoints()
        if paths:
            self._number = _number(paths[-1])
        for path in reversed(paths):
            held = self._read(path)
            problem = held if isinstance(held, str) else self._damage(held)
            if problem is None and isinstance(held, Checkpoint):
                if held.identity == self.identity:
                    return held
                self.other = self.other or held
                problem = "it is of another training"
            log.warning("%s cannot be used (%s): an earlier one counts, if any", path, problem)
        return None

    def _read(self, path: Path) -> Checkpoint | str:
        """The checkpoint, or what is wrong with it."""
        try:
            whole = json.loads(path.read_bytes())
            text = whole["content"]
            if hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
                return "its content does not fit its hash"
            return Checkpoint.model_validate_json(text)
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
            return "it is damaged"

    def _damage(self, checkpoint: Checkpoint) -> str | None:
        training = [checkpoint.training] if checkpoint.training else []
        for file in (*checkpoint.learned, *training):
            path = self.folder / file.name
            try:
                if path.stat().st_size != file.size:
                    return f"{file.name} is cut off"
                if read_tensors(path).sha256 != file.sha256:
                    return f"{file.name} is damaged"
            except CorruptFile as error:
                return f"{file.name} {error.problem}"
            except OSError as error:
                return f"{file.name} cannot be read: {error.strerror}"
        return None

    def _checkpoints(self) -> list[Path]:
        """Oldest first; files of other names are none of ours."""
        found = self.folder.glob("checkpoint-*.json")
        return sorted((path for path in found if CHECKPOINT_NAME.fullmatch(path.name)), key=_number)

    def _own_files(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if OWN_NAME.fullmatch(path.name)]


def _of_adam(own: Mapping[str, Tensor], parameter: Tensor) -> bool:
    """Whether this is what Adam keeps of a parameter."""
    if own.keys() != {"step", "exp_avg", "exp_avg_sq"}:
        return False
    step = own["step"]
    if step.shape != () or not step.is_floating_point() or not bool(step >= 0):
        return False
    return all(_like(own[name], parameter) for name in ("exp_avg", "exp_avg_sq"))


def _like(kept: Tensor, parameter: Tensor) -> bool:
    same = kept.shape == parameter.shape and kept.dtype == parameter.dtype
    return same and bool(kept.isfinite().all())


def _number(path: Path) -> int:
    found = CHECKPOINT_NAME.fullmatch(path.name)
    return int(found[1]) if found else 0


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def heed(stop: Callable[[], bool], event: Event) -> None:
    """Stop between two steps, where asked to; within a training the keeper does, after keeping."""
    if event.kind in ("task", "evaluation", "pass") and stop():
        raise Interrupted
