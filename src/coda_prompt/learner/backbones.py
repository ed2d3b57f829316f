"""Which encoder a model needs, and whether it may be opened."""

from __future__ import annotations

import re
from pathlib import Path

from coda_prompt.encoder.catalog import CATALOG, parse_name
from coda_prompt.encoder.encoder import Encoder, load_encoder
from coda_prompt.errors import BackboneMismatch, BadOption, MissingData
from coda_prompt.learner.model import AUTO
from coda_prompt.learner.records import BackboneRecord

MAX_IMAGE_SIZE = 1024
"""Pixels a side up to which a model chooses the size: position embeddings grow with its square."""
MAX_NAME_SHOWN = 80
"""Characters of a file's name in a message."""


def open_encoder(
    made_with: BackboneRecord | None, named: str | Encoder | None, folder: Path | None
) -> Encoder:
    """Load the encoder of a new model, or of one that was made with it.

    Args:
        made_with: What an existing model says about it.
        named: What the user says, with whose consent it may be downloaded.
        folder: The existing model, for messages.

    Raises:
        BackboneMismatch: It is not the encoder the model was made with.
        BadOption, MissingData: As `resolve_backbone`.
    """
    if made_with is None:
        assert isinstance(named, str)
        return load_encoder(named)
    if isinstance(named, Encoder):
        encoder = named
    else:
        text = resolve_backbone(made_with, named, folder)
        encoder = load_encoder(text, download=named not in (None, AUTO))
    if encoder.fingerprint != made_with.fingerprint:
        raise BackboneMismatch(folder, made_with.fingerprint, encoder.fingerprint)
    return encoder


def resolve_backbone(made_with: BackboneRecord, named: str | None, folder: Path | None) -> str:
    """Return the encoder to load, after checking that the model may have been made with it.

    Whether it was is decided by the fingerprint of what is loaded. Models are not trusted: a path
    in one is not opened, and only an encoder that a user names is downloaded, or of any size.

    Raises:
        BadOption: The model was made with another encoder, or with one of an unusual size.
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
            raise BadOption("the model", "backbone", problem)
        if known is None:
            return str(path)
    elif known is None or made_with.path is not None:
        file = Path(made_with.path or made_with.name).name[:MAX_NAME_SHOWN]
        problem = f"it was made with a backbone from a file ({file}), which a model cannot open"
        remedy = "Name the file with --backbone PATH (backbone=... in Python)."
        raise MissingData(folder, problem, remedy)
    assert parts is not None
    if int(parts[2] or 0) > MAX_IMAGE_SIZE:
        problem = f"{folder} needs images of {parts[2]} px; if that is right, name {made_with.name}"
        raise BadOption("the model", "backbone", problem)
    return made_with.name if path is None else f"{made_with.name}={path}"
