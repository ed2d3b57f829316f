"""Which backbone, method and options a saved model needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from coda_prompt import errors, methods
from coda_prompt.learner.store import BackboneRecord, Description
from coda_prompt.model.catalog import CATALOG, load_backbone, parse_backbone
from coda_prompt.storage.files import file_sha256
from coda_prompt.training.settings import Training

AUTO = "auto"
"""The backbone that suits the images of the first lesson."""
TRAINING_FIELDS = frozenset(field.name for field in dataclasses.fields(Training))
_RESERVED = TRAINING_FIELDS | {"device", "fabric", "backbone", "method"}


def training_options(description: Description, path: object) -> dict[str, Any]:
    """Return the options of the training that a model was made with.

    Raises:
        CorruptFile: Its options are not those of a method and a training.
    """
    if not description.training.keys() <= TRAINING_FIELDS or _RESERVED & description.options.keys():
        raise errors.CorruptFile(path, "its options are not those of a method and a training")
    # The number of loader processes depends on the machine, not on the model.
    return {**description.training, "workers": 0}


def resolve_backbone(made_with: BackboneRecord, named: str | None, folder: Path) -> str:
    """Return the backbone to load, after checking that the model may have been made with it.

    Whether it was is decided by the fingerprint of what is loaded.

    Raises:
        BadOption: The model was made with another backbone.
        MissingData: The file of the backbone is not there.
    """
    known = made_with.name.partition("@")[0] in CATALOG
    if named not in (None, AUTO, made_with.name):
        entry, _, path = parse_backbone(str(named))
        if path is None or (entry is not None and entry.name != made_with.name.partition("@")[0]):
            problem = f"{folder} was made with {made_with.name}; make another model for {named}"
            raise errors.BadOption("the model", "backbone", problem)
        return f"{made_with.name}={path}" if known else str(path)
    if made_with.path is None or (not known and Path(made_with.name).exists()):
        return made_with.name
    if not Path(made_with.path).exists():
        remedy = "Name it where it is now: --backbone PATH (backbone=... in Python)."
        raise errors.MissingData(made_with.path, f"the backbone of {folder} is not there", remedy)
    return f"{made_with.name}={made_with.path}" if known else made_with.path


def check_backbone(made_with: BackboneRecord, named: str | None, folder: Path) -> None:
    """Check whether a backbone is the one a model was made with.

    Raises:
        BackboneMismatch: It is not.
    """
    fingerprint = load_backbone(resolve_backbone(made_with, named, folder)).vit.fingerprint()
    if fingerprint != made_with.fingerprint:
        raise errors.BackboneMismatch(folder, made_with.fingerprint, fingerprint)


def resolve_method(description: Description, named: str | None, folder: Path) -> str:
    """Return the method to construct, after checking that the model was made with it.

    A file is compared by its hash before anything in it runs.

    Raises:
        BadOption: The model was made with another method, or with a file that is not named.
        BadMethod, HashMismatch: The file is not there or not the one the model was made with.
        CorruptFile: The model names a method that does not exist.
    """
    made_with = description.method
    if description.method_sha256 is None:
        if made_with not in methods.METHODS:
            raise errors.CorruptFile(folder, f"its method '{made_with}' is not part of coda-prompt")
        if named not in (None, made_with):
            raise _other_method(made_with, str(named))
        return made_with
    if named is None:
        problem = (
            f"{folder} was made with the class {made_with} from a file of yours, and a model "
            "contains no code; name the file and the class with --method path/to/file.py:CLASS "
            "(method=... in Python)"
        )
        raise errors.BadOption("the model", "method", problem)
    path, _, class_name = named.rpartition(":")
    if class_name != made_with:
        raise _other_method(made_with, named)
    if not Path(path).is_file():
        raise errors.BadMethod(named, f"there is no file {path}")
    if Path(path).resolve().is_relative_to(folder.resolve()):
        problem = f"{path} is inside the model folder, and no code from there is run; move it"
        raise errors.BadOption("the model", "method", problem)
    sha256 = file_sha256(Path(path))
    if sha256 != description.method_sha256:
        raise errors.HashMismatch(
            path,
            description.method_sha256,
            sha256,
            f"{folder} was made with another version of this file. Name that version, or learn a "
            "new model with this one.",
        )
    return named


def _other_method(made_with: str, named: str) -> errors.BadOption:
    """Return the error of a model made with another method than the one named.

    Raises:
        UnknownName: There is no such method.
    """
    if ".py" not in named:
        methods.find(named)
    problem = f"this model was made with {made_with}; make another model for {named}"
    return errors.BadOption("the model", "method", problem)
