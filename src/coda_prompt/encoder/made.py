"""Encoders that are made once, from weights or a download, and kept in the user's cache.

Found there, they need neither torch nor the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from coda_prompt.encoder.catalog import CatalogEntry
from coda_prompt.encoder.description import read_description
from coda_prompt.encoder.download import Pin, fetch, hub_cache, pinned
from coda_prompt.errors import MissingData, MissingExtra
from coda_prompt.storage.files import file_sha256

DESCRIPTION = "encoder.json"
"""In a folder with an encoder."""


def cache_folder() -> Path:
    """Return the folder of all encoders that were made here."""
    return hub_cache() / "coda-prompt-encoders"


def find_encoder(fingerprint: str) -> Path | None:
    """Return the folder of an encoder that was made here; None: there is none."""
    for path in sorted(cache_folder().glob(f"*/{DESCRIPTION}")):
        if read_description(path).fingerprint == fingerprint:
            return path.parent
    return None


def from_file(text: str, path: Path) -> Path:
    """Return the folder of the encoder with the weights of a local file.

    Args:
        text: What the user wrote: `PATH`, `NAME=PATH` or `NAME@SIZE=PATH`.
        path: The path in it.

    Raises:
        MissingData: There is no such file.
        MissingExtra: It was not made yet, and torch is not installed.
    """
    if not path.is_file():
        remedy = "Use the path of a .safetensors or .onnx file or of a folder, or a name."
        raise MissingData(path, "there is no such file", remedy)
    known_as = "" if Path(text) == path else text.partition("=")[0]
    return _from_weights(text, file_sha256(path), known_as)


def from_embedded(text: str, weights_fingerprint: str) -> Path:
    """Return the folder of an embedded encoder for another size of images.

    Raises:
        MissingExtra: It was not made yet, and torch is not installed.
    """
    return _from_weights(text, weights_fingerprint, text)


def from_hub(text: str, entry: CatalogEntry, download: bool) -> tuple[Path, Pin]:
    """Return the folder of an encoder of the catalogue, and the version of its weights.

    Raises:
        BackboneUnavailable: The weights cannot be downloaded.
        MissingData: They would have to be downloaded without `download`.
        MissingExtra: It was not made yet, and torch is not installed.
    """
    assert entry.repository is not None
    assert entry.file is not None
    pin = pinned(entry.repository, entry.file)
    if pin is None or not _folder(pin.sha256, text).is_dir():
        _exporter(text)  # before a download in vain
        _, pin = fetch(entry.name, entry.repository, entry.file, download=download)
    return _from_weights(text, pin.sha256, text), pin


def from_repository(name: str, download: bool) -> tuple[Path, Pin]:
    """Return the folder of an encoder that is on the hub as graphs and JSON, and its version.

    Raises:
        BackboneUnavailable: It cannot be downloaded.
        CorruptFile: The JSON does not describe an encoder.
        MissingData: It would have to be downloaded without `download`.
    """
    path, pin = fetch(name, name, DESCRIPTION, download=download)
    description = read_description(path.resolve())  # the cache has a link to it

    def copy(folder: Path) -> None:
        for network in description.networks:
            for file in network.files:
                fetched, _ = fetch(name, name, file, download=download)
                shutil.copyfile(fetched, folder / file)
        shutil.copyfile(path, folder / DESCRIPTION)

    return _made(_folder(pin.sha256, name), copy), pin


def _from_weights(text: str, sha256: str, known_as: str) -> Path:
    """Return the folder of the encoder with the given weights, made if there is none yet."""

    def make(folder: Path) -> None:
        _exporter(text)(text, folder)

    return _made(_folder(sha256, known_as), make)


def _folder(sha256: str, known_as: str) -> Path:
    """Return where an encoder is kept, by the hash it was made from and its name and size."""
    key = hashlib.sha256(json.dumps([sha256, known_as]).encode()).hexdigest()
    return cache_folder() / key


def _made(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return a folder, made in one step unless it exists."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary, "made")
        made.mkdir()
        make(made)
        with contextlib.suppress(OSError):  # another process has made it
            os.replace(made, folder)
    return folder


def _exporter(text: str) -> Callable[[str, Path], object]:
    """Return the function that makes an encoder from weights, the only one that needs torch."""
    try:
        from coda_prompt.research.export import export_backbone
    except ModuleNotFoundError as error:
        raise MissingExtra(f"The first use of the weights of '{text}'", "research") from error
    return export_backbone
