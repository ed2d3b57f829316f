"""Checkpoints of a training run: an interrupted run resumes and ends bit-identical.

    checkpoint-000017.json       the position in the training and the hash of every file it needs
    learned-000015.safetensors   the learned state of the finished tasks
    training-000017.safetensors  parameters and optimizer state within a task

All files are written atomically, the checkpoint last. The last two checkpoints are retained; a
run resumes from the newest intact one. Random generators need no state on disk: they are keyed by
seed, task, epoch and image.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from coda_prompt.errors import CorruptFile
from coda_prompt.research.methods import Method
from coda_prompt.research.tensors import as_arrays, as_tensors
from coda_prompt.storage.checkpoints import own_files, remove_checkpoints
from coda_prompt.storage.files import FileSchema, check_regular, read_regular, write_atomically
from coda_prompt.storage.tensors import read_tensors, write_tensors

log = logging.getLogger(__name__)

FORMAT = 1
RETAINED = 2
CHECKPOINT = "checkpoint-{:06}.json"
LEARNED, TRAINING = "learned-{:06}.safetensors", "training-{:06}.safetensors"
FILE_NAME = r"^(learned|training)-[0-9]{6,12}\.safetensors$"
CHECKPOINT_NAME = re.compile(r"checkpoint-([0-9]{6,8})\.json")


class FileRecord(FileSchema):
    """A tensor file that a checkpoint needs."""

    name: str = Field(pattern=FILE_NAME)
    sha256: str
    size: int = Field(ge=0)


class TrainingPosition(FileSchema):
    """The position in a training between two steps."""

    model_config = ConfigDict(frozen=False)

    task: int = Field(default=0, ge=0)
    """Finished tasks."""
    stage: int = Field(default=0, ge=0)
    """Finished stages of the current task."""
    epoch: int = Field(default=0, ge=0)
    """Finished epochs of the stage."""
    step: int = Field(default=0, ge=0)
    """Finished steps of the epoch."""
    losses: list[float] = Field(default_factory=list)
    """Mean loss of each finished epoch of the task."""
    sum_of_losses: float = 0.0
    """Over the images of the epoch's finished steps."""
    steps_of_task: int = Field(default=0, ge=0)
    """Optimizer steps of the task so far, in all its stages."""

    def after_epoch(self, images: int) -> TrainingPosition:
        """Return the position after the current epoch, of which `images` images were trained."""
        losses = [*self.losses, self.sum_of_losses / images]
        update = {"epoch": self.epoch + 1, "step": 0, "losses": losses, "sum_of_losses": 0.0}
        return self.model_copy(update=update)

    def at_stage(self, stage: int) -> TrainingPosition:
        """Return the position at the start of a later stage."""
        update = {"stage": stage, "epoch": 0, "step": 0, "sum_of_losses": 0.0}
        return self.model_copy(update=update)


class Checkpoint(TrainingPosition):
    """The content of a checkpoint file."""

    format: int = Field(ge=1, le=FORMAT)
    identity: Any
    """Everything that determines the result; another training does not resume from here."""
    learned: FileRecord | None
    """None before the end of the first task."""
    training: FileRecord | None
    """None between two tasks."""
    notes: dict[str, Any]
    """The caller's own data at that time."""

    @property
    def files(self) -> list[FileRecord]:
        """The files that it needs."""
        return [file for file in (self.learned, self.training) if file is not None]


class Checkpointer:
    """Saves one training to a folder and resumes it from there.

    Attributes:
        latest: The newest intact checkpoint of this training; None after it was restored.
        other_training: The newest intact checkpoint, if it is of a different training.
    """

    def __init__(
        self,
        folder: Path,
        identity: Any,
        *,
        interval: float = 60.0,
        writes: bool = True,
        notes: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """
        Args:
            folder: Where the files are; created with the first checkpoint.
            identity: JSON that determines the result, compared when resuming.
            interval: Seconds between two checkpoints within an epoch.
            writes: True on the one rank that writes; all ranks resume from its files.
            notes: The caller's own data to store with each checkpoint.
        """
        check_regular(folder, folder=True)
        self.folder, self.identity, self.interval = folder, identity, interval
        self.writes = writes
        self._notes = notes
        self._number = 0
        self._last_save = time.monotonic()
        self.other_training: Checkpoint | None = None
        self.latest = self._newest_checkpoint()
        self._learned = None if self.latest is None else self.latest.learned

    # -- resuming

    @property
    def position(self) -> TrainingPosition | None:
        """The position to resume from within a task; None: the next task starts from the beginning.

        Raises:
            CorruptFile: The counts of the checkpoint contradict each other.
        """
        latest = self.latest
        if latest is None or latest.training is None:
            return None
        epochs = len(latest.losses)  # of all stages
        if epochs < latest.epoch or (latest.stage == 0 and epochs > latest.epoch):
            raise CorruptFile(self.folder, "a checkpoint has losses of other epochs than it counts")
        return TrainingPosition(**latest.model_dump(include=set(TrainingPosition.model_fields)))

    def restore_learned(self, method: Method) -> None:
        """Load what the finished tasks learned."""
        if self._learned is not None:
            method.load_learned_state(
                as_tensors(read_tensors(self.folder / self._learned.name).tensors)
            )

    def restore_training(self, method: Method, optimizer: Optimizer) -> TrainingPosition | None:
        """Load parameters and optimizer state if a task was interrupted.

        Returns:
            The position to continue from; None if the task starts from the beginning.

        Raises:
            CorruptFile: The checkpoint does not match the method or the optimizer.
        """
        position, latest = self.position, self.latest
        self.latest = None
        if position is None or latest is None or latest.training is None:
            return None
        path = self.folder / latest.training.name
        tensors = as_tensors(read_tensors(path).tensors)
        _load_parameters(method, tensors, path)
        if position.stage:
            _load_buffers(method, tensors, path)
        _load_optimizer(method, optimizer, tensors, path)
        return position

    # -- saving

    def save_after_task(self, method: Method, task: int) -> None:
        """Save what was learned by the end of a finished and evaluated task."""
        if self.writes:
            self._learned = self._write_tensors(LEARNED, method.learned_state())
            self._write_checkpoint(TrainingPosition(task=task + 1), None)

    def save_after_step(
        self, method: Method, optimizer: Optimizer, position: TrainingPosition, *, now: bool = False
    ) -> None:
        """Save within a task if an epoch has ended, the interval has passed, or `now`."""
        due = now or position.step == 0 or time.monotonic() - self._last_save >= self.interval
        if due and self.writes:
            tensors = _training_tensors(method, optimizer, position.stage)
            self._write_checkpoint(position, self._write_tensors(TRAINING, tensors))

    def remove(self) -> None:
        """Delete all checkpoints once the training is finished."""
        if self.writes:
            remove_checkpoints(self.folder)

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> FileRecord:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name.format(self._number + 1)
        sha256 = write_tensors(path, as_arrays(tensors), {"checkpoint": FORMAT})
        return FileRecord(name=path.name, sha256=sha256, size=path.stat().st_size)

    def _write_checkpoint(self, position: TrainingPosition, training: FileRecord | None) -> None:
        self._number += 1
        checkpoint = Checkpoint(
            format=FORMAT,
            identity=self.identity,
            **position.model_dump(),
            learned=self._learned,
            training=training,
            notes=self._notes(),
        )
        text = checkpoint.model_dump_json()
        content = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
        path = self.folder / CHECKPOINT.format(self._number)
        write_atomically(path, json.dumps(content).encode())
        self._last_save = time.monotonic()
        self._remove_unneeded()

    def _remove_unneeded(self) -> None:
        """Delete older checkpoints and the files that only they needed."""
        retained = self._checkpoint_paths()[-RETAINED:]
        needed = {path.name for path in retained}
        for path in retained:
            checkpoint = self._read(path)
            if isinstance(checkpoint, Checkpoint):
                needed |= {file.name for file in checkpoint.files}
        for path in own_files(self.folder):
            if path.name not in needed:
                path.unlink(missing_ok=True)

    # -- reading

    def _newest_checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint of this training."""
        paths = self._checkpoint_paths()
        if paths:
            self._number = _number(paths[-1])
        for path in reversed(paths):
            checkpoint = self._read(path)
            problem = checkpoint if isinstance(checkpoint, str) else self._damage(checkpoint)
            if problem is None and isinstance(checkpoint, Checkpoint):
                if checkpoint.identity == self.identity:
                    return checkpoint
                self.other_training = self.other_training or checkpoint
                problem = "it belongs to another training"
            log.warning("%s cannot be used (%s); trying an earlier checkpoint", path, problem)
        return None

    def _read(self, path: Path) -> Checkpoint | str:
        """The checkpoint, or what is wrong with it."""
        try:
            file = json.loads(read_regular(path))
            text = file["content"]
            if hashlib.sha256(text.encode()).hexdigest() != file["sha256"]:
                return "its content does not match its sha256"
            return Checkpoint.model_validate_json(text)
        except CorruptFile as error:
            return error.problem
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
            return "it is damaged"

    def _damage(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with the files of a checkpoint."""
        for file in checkpoint.files:
            path = self.folder / file.name
            try:
                if path.stat().st_size != file.size:
                    return f"{file.name} is truncated"
                if read_tensors(path).sha256 != file.sha256:
                    return f"{file.name} is damaged"
            except CorruptFile as error:
                return f"{file.name} {error.problem}"
            except OSError as error:
                return f"{file.name} cannot be read: {error.strerror}"
        return None

    def _checkpoint_paths(self) -> list[Path]:
        """Oldest first."""
        paths = self.folder.glob("checkpoint-*.json")
        return sorted((path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)), key=_number)


def _training_tensors(method: Method, optimizer: Optimizer, stage: int) -> dict[str, Tensor]:
    """Parameters and optimizer state as `parameter.NAME` and `optimizer.NAME.KEY`."""
    state: dict[str, Tensor] = dict(_trainable(method))
    if stage:  # earlier stages changed more than what trains now
        state |= method.learned_state()
    tensors = {f"parameter.{name}": value for name, value in state.items()}
    for name, parameter in _trainable(method).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return tensors


@torch.no_grad()
def _load_parameters(method: Method, tensors: Mapping[str, Tensor], path: Path) -> None:
    for name, parameter in method.named_parameters():
        saved = tensors.get(f"parameter.{name}")
        if saved is None and not parameter.requires_grad:
            continue
        if saved is None or not _matches(saved, parameter):
            raise CorruptFile(path, f"it does not fit the parameter '{name}'")
        parameter.copy_(saved)


def _load_buffers(method: Method, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load buffers that earlier stages may have changed or enlarged."""
    for name, buffer in list(method.named_buffers()):
        saved = tensors.get(f"parameter.{name}")
        if saved is None:
            continue
        if saved.dtype != buffer.dtype or saved.dim() != buffer.dim():
            raise CorruptFile(path, f"it does not fit the buffer '{name}'")
        owner, _, attribute = name.rpartition(".")
        setattr(method.get_submodule(owner), attribute, saved.to(buffer.device))


def _load_optimizer(
    method: Method, optimizer: Optimizer, tensors: Mapping[str, Tensor], path: Path
) -> None:
    names = {id(parameter): name for name, parameter in _trainable(method).items()}
    state = optimizer.state_dict()
    parameters = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    for index, (parameter, group) in enumerate(parameters):
        name = names[id(parameter)]
        prefix = f"optimizer.{name}."
        saved = {key[len(prefix) :]: tensors[key] for key in tensors if key.startswith(prefix)}
        if saved:
            if not _fits_optimizer(saved, parameter, type(optimizer), group):
                raise CorruptFile(path, f"its optimizer state does not fit the parameter '{name}'")
            state["state"][index] = saved
    optimizer.load_state_dict(state)


def _fits_optimizer(
    saved: Mapping[str, Tensor], parameter: nn.Parameter, kind: Any, group: dict[str, Any]
) -> bool:
    """Whether this is what the optimizer stores for a parameter: counters and tensors like it."""
    probe = nn.Parameter(torch.zeros(1, device=parameter.device))
    probe.grad = torch.zeros_like(probe)
    reference_optimizer = kind([{**group, "params": [probe]}])
    reference_optimizer.step()
    expected = {
        key: value for key, value in reference_optimizer.state[probe].items() if value is not None
    }
    if saved.keys() != expected.keys():
        return False
    for key, value in saved.items():
        if torch.as_tensor(expected[key]).dim() == 0:  # a counter
            if value.shape != () or not value.is_floating_point() or not bool(value >= 0):
                return False
        elif not _matches(value, parameter):
            return False
    return True


def _trainable(method: Method) -> dict[str, nn.Parameter]:
    return {name: each for name, each in method.named_parameters() if each.requires_grad}


def _matches(saved: Tensor, parameter: Tensor) -> bool:
    same = saved.shape == parameter.shape and saved.dtype == parameter.dtype
    return same and bool(saved.isfinite().all())


def _number(path: Path) -> int:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else 0
