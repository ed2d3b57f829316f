"""Saving, loading, sharing and exporting a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_prompt import errors
from coda_prompt.learner import loading, store
from coda_prompt.learner.estimator import Estimator
from coda_prompt.learner.store import EditRecord, TaskRecord
from coda_prompt.learner.versions import History, stored_versions
from coda_prompt.research.vit.catalog import LoadedBackbone

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from typing_extensions import Self

    from coda_prompt.research.training.checkpointing import Checkpointer
    from coda_prompt.research.training.local import LocalDevice, PredictionPrecision


class SavedEstimator(Estimator):
    """A classifier whose versions are saved in model folders."""

    _saved: store.Model | None = None
    """The model as read or written; None if it has changed since."""
    _checkpointer: Checkpointer | None = None
    """Checkpoints of the newest lesson, removed when the model is saved."""
    _home: tuple[Path, str | None] | None = None
    """The folder last read or written, and the hash of the model in it."""

    _history: History
    """Earlier and undone versions, in memory or in the folder they are read from."""

    def _reset(self) -> None:
        super()._reset()
        self._saved = self._checkpointer = None
        self._history = History()

    @property
    def can_undo(self) -> bool:
        """Whether there is an earlier version."""
        return bool(self._history.before)

    @property
    def can_redo(self) -> bool:
        """Whether there is a version that was undone."""
        return bool(self._history.after)

    def undo(self, to: int | None = None) -> None:
        """Restore an earlier version, bit for bit: what was before the newest lesson or edit.

        Args:
            to: Number of the version, as in `history`; by default the one before.

        Raises:
            NothingToUndo: There is no such version; the last ten are stored.
        """
        before = self._history.before
        self._go_to(to if to is not None else before[-1].number if before else None)

    def redo(self) -> None:
        """Restore the version that `undo` replaced, bit for bit.

        Raises:
            NothingToUndo: There is no such version: a new lesson or edit drops the undone ones.
        """
        after = self._history.after
        self._go_to(after[0].number if after else None, redo=True)

    def _go_to(self, number: int | None, *, redo: bool = False) -> None:
        model = None if number is None else self._history.go_to(number, self._model())
        if model is None:
            raise errors.NothingToUndo("The classifier", number, redo=redo)
        self.network.set_state(model, f"version {number}")
        self._saved = model

    def _replace(
        self,
        previous: store.Model | None,
        tasks: list[TaskRecord],
        edit: EditRecord | None = None,
        temperature: float | None = None,
    ) -> None:
        """Record that what is learned now is a new version that replaces `previous`."""
        network = self.network
        network.set_tasks(tasks, temperature)  # first: if it fails, nothing is recorded
        others = (*self._history.before, *self._history.after)
        number = max([network.number, *(each.number for each in others)]) + 1
        if previous is not None:
            self._history.replaced(previous)
        network.number, self._saved = number, None
        if edit is not None:
            network.edits = [*network.edits, edit]

    def save(self, folder: str | Path) -> None:
        """Write the model; if this is interrupted, the folder has one complete version.

        Raises:
            ModelChanged: Another process changed the folder since this classifier was loaded from
                it or saved to it.
        """
        folder = Path(folder)
        with store.exclusive_writer(folder):
            current = (folder.resolve(), store.model_sha256(folder))
            if self._home is not None and self._home[0] == current[0] and self._home != current:
                raise errors.ModelChanged(folder)
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the model like `save`, for a caller that has locked the folder."""
        model = self._model()
        at_home = self._home is not None and self._home[0] == folder.resolve()
        store.write_model(folder, model, self._history, at_home=at_home)
        self._saved, self._home = model, (folder.resolve(), store.model_sha256(folder))
        if self._checkpointer is not None:
            self._checkpointer.remove()
            self._checkpointer = None

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        backbone: str | LoadedBackbone | None = None,
        method: str | None = None,
        device: str = "auto",
        precision: PredictionPrecision | None = None,
        verbose: bool = True,
        fabric: Fabric | LocalDevice | None = None,
    ) -> Self:
        """Load a saved model together with its backbone. No code in the folder is ever run.

        Args:
            folder: The model folder.
            backbone: The backbone's weights, if they are a file that has moved: `NAME=PATH` or
                `PATH`. Or a loaded backbone, to share it among classifiers. The fingerprint is
                checked.
            method: `path/to/file.py:Class`, required if the model was made with a method of your
                own: a model stores the class name and the hash of the file, but no code.
            device: `auto`, `cpu`, `cuda` or `mps`.
            precision: As in the constructor.
            verbose: As in the constructor.
            fabric: A launched Fabric, or what `find_device` returns, instead of `device`.

        Raises:
            BadOption: `method` is not the method the model was made with.
            CorruptFile: The model is damaged.
            MissingData: There is no model in the folder.
            BackboneMismatch: The backbone is not the one the model was made with.
        """
        folder = Path(folder)
        model = store.read_model(folder)
        classifier = cls._of_model(
            model,
            folder,
            backbone,
            method,
            device=device,
            precision=precision,
            verbose=verbose,
            fabric=fabric,
        )
        classifier._history = stored_versions(folder, model.description)
        classifier._home = (folder.resolve(), store.model_sha256(folder))
        return classifier

    @classmethod
    def _of_model(
        cls,
        model: store.Model,
        folder: Path,
        backbone: str | LoadedBackbone | None,
        method: str | None,
        **options: Any,
    ) -> Self:
        """Return a classifier that has learned what is in a model, read from `folder`."""
        training = loading.training_options(model.description, folder)
        method = loading.resolve_method(model.description, method, folder)
        made_with = model.description.backbone
        if isinstance(backbone, LoadedBackbone):
            text, loaded = made_with.name, backbone
        else:
            text, loaded = loading.load_named_backbone(made_with, backbone, folder)
        classifier = cls(
            text,
            method,
            options=model.description.options,
            training=training,
            **options,
        )
        stored_bytes = sum(tensor.nbytes for tensor in model.tensors.values())
        network = classifier._network = classifier._build(loaded, stored_bytes)
        network.backbone_name = made_with.name
        network.check_backbone(model.description, folder)
        network.set_state(model, folder)
        classifier._saved = model
        return classifier

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model like `save`: the folder has the layout of the Hugging Face hub."""
        self.save(folder)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        backbone: str | None = None,
        method: str | None = None,
        device: str = "auto",
        precision: PredictionPrecision | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> Self:
        """Load a model from a folder or from the Hugging Face hub.

        Args:
            name: A folder, or `owner/name` on the hub.
            revision: Branch, tag or commit on the hub.
            backbone: As in `load`.
            method: As in `load`.
            device: As in `load`.
            precision: As in the constructor.
            token: Access token of the hub.
            endpoint: URL of another hub.
        """
        if Path(name).is_dir():
            return cls.load(
                name, backbone=backbone, method=method, device=device, precision=precision
            )
        from coda_prompt.learner.hub import download_model

        model = download_model(str(name), revision, token, endpoint)
        return cls._of_model(
            model, Path(name), backbone, method, device=device, precision=precision
        )

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = True,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload the model and its card to `owner/name` on the hub; return the commit's URL."""
        from coda_prompt.learner.hub import upload_model

        return upload_model(name, self._model(), private=private, token=token, endpoint=endpoint)

    def export_onnx(self, path: str | Path) -> None:
        """Write the model with its backbone as one ONNX graph, from pixels to probabilities.

        Raises:
            MissingExtra: The packages for ONNX are not installed.
            NotLearned: No class has been learned yet.
        """
        predictor = self.predictor
        from coda_prompt.learner.export import export_onnx

        export_onnx(predictor, self.network.preprocessing(), Path(path))

    def _model(self) -> store.Model:
        """Return the model to save."""
        if self._saved is not None:
            return self._saved
        before = self._history.before
        return self.network.to_model(before[-1].number if before else None)
