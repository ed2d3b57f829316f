"""Which backbone, method and options a saved model needs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from coda_prompt import errors
from coda_prompt.encoder.catalog import parse_name
from coda_prompt.learner.store import BackboneRecord, Description
from coda_prompt.research import methods
from coda_prompt.research.training.settings import Training
from coda_prompt.research.vit.catalog import (
    CATALOG,
    LoadedBackbone,
    load_backbone,
)
from coda_prompt.storage.files import file_sha256

AUTO = "auto"
"""The backbone that suits the images of the first lesson."""
TRAINING_FIELDS = frozenset(field.name for field in dataclasses.fields(Training))
MAX_IMAGE_SIZE = 1024
"""Pixels a side up to which a model chooses the size: position embeddings grow with its square."""
MAX_NAME_SHOWN = 80
"""Characters of a file's name in a message."""
MAX_OPTION = 2**31
"""Largest number among a model's options."""
_RESERVED = {"device", "fabric", "backbone", "method"}


def training_options(description: Description, path: object) -> dict[str, Any]:
    """Return the options of the training that a model was made with.

    Raises:
        CorruptFile: Its options are not those of a method and a training.
    """
    options = description.options
    numbers = [
        number
        for value in options.values()
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int | float)
    ]
    own = description.training.keys() <= TRAINING_FIELDS and not _RESERVED & options.keys()
    if not own or not all(abs(number) <= MAX_OPTION for number in numbers):  # also if one is NaN
        raise errors.CorruptFile(path, "its options are not those of a method and a training")
    # The number of loader processes depends on the machine, not on the model.
    return {**description.training, "workers": 0}


def resolve_backbone(made_with: BackboneRecord, named: str | None, folder: Path) -> str:
    """Return the backbone to load, after checking that the model may have been made with it.

    Whether it was is decided by the fingerprint of what is loaded. Models are not trusted: a path
    in one is not opened, and only a backbone that a user names is downloaded, or of any size.

    Raises:
        BadOption: The model was made with another backbone, or with one of an unusual size.
        MissingData: The model was made with a file, and none is named.
    """
    parts = re.fullmatch("([^@=]+)(?:@([0-9]{1,5}))?", made_with.name)
    known = parts[1] if parts and parts[1] in CATALOG else None
    if known is not None and named == made_with.name:
        return named
    path = None
    if named not in (None, AUTO):
        entry, _, path = parse_name(str(named), CATALOG)
        if path is None or (entry is not None and entry.name != known):
            problem = f"{folder} was made with {made_with.name}; make another model for {named}"
            raise errors.BadOption("the model", "backbone", problem)
        if known is None:
            return str(path)
    elif known is None or made_with.path is not None:
        file = Path(made_with.path or made_with.name).name[:MAX_NAME_SHOWN]
        problem = f"it was made with a backbone from a file ({file}), which a model cannot open"
        remedy = "Name the file with --backbone PATH (backbone=... in Python)."
        raise errors.MissingData(folder, problem, remedy)
    assert parts is not None
    if int(parts[2] or 0) > MAX_IMAGE_SIZE:
        problem = f"{folder} needs images of {parts[2]} px; if that is right, name {made_with.name}"
        raise errors.BadOption("the model", "backbone", problem)
    return made_with.name if path is None else f"{made_with.name}={path}"


def load_named_backbone(
    made_with: BackboneRecord, named: str | None, folder: Path
) -> tuple[str, LoadedBackbone]:
    """Load the backbone of a model; raises as `resolve_backbone` and `load_backbone`.

    Args:
        made_with: What the model says about it.
        named: What the user says, with whose consent it may be downloaded.
        folder: The model folder.

    Returns:
        The backbone as a user would write it, and what was loaded.
    """
    text = resolve_backbone(made_with, named, folder)
    return text, load_backbone(text, download=named not in (None, AUTO))


def check_backbone(made_with: BackboneRecord, named: str | None, folder: Path) -> None:
    """Check whether a backbone is the one a model was made with.

    Raises:
        BackboneMismatch: It is not.
    """
    fingerprint = load_named_backbone(made_with, named, folder)[1].vit.fingerprint()
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
