"""Download weights from the Hugging Face Hub and pin them.

The commit and sha256 of a file are recorded in the hub's cache folder on first use. Later uses
request that commit and reject any other content.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from coda_prompt.errors import BackboneUnavailable, CorruptFile, HashMismatch, MissingData
from coda_prompt.storage.files import file_sha256, write_atomically
from coda_prompt.storage.hub import request_metadata

log = logging.getLogger(__name__)

PINS_FILE = "coda-prompt-backbones.json"


@dataclass(frozen=True)
class Pin:
    """A version of a file: its commit and the hash of its content."""

    revision: str
    sha256: str


def hub_cache() -> Path:
    """Return the folder where huggingface_hub keeps what it downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def pinned(repository: str, file: str) -> Pin | None:
    """Return the version of a file that was used first; None: none was."""
    return _read_pins(hub_cache() / PINS_FILE).get(f"{repository}/{file}")


def fetch(
    name: str,
    repository: str,
    file: str,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    download: bool = True,
) -> tuple[Path, Pin]:
    """Download a file of the hub unless it is cached, and check it.

    Without `download`, it has to be cached.

    Returns:
        Its local path, and the version that is pinned.

    Raises:
        BackboneUnavailable: it is not cached and cannot be downloaded.
        HashMismatch: the download is damaged, or differs from the pinned version.
        MissingData: it is not cached, and `download` is false.
    """
    from huggingface_hub import try_to_load_from_cache

    cache = hub_cache() if cache is None else cache.expanduser().resolve()
    pins_file, key = cache / PINS_FILE, f"{repository}/{file}"
    repository_folder = cache / f"models--{repository.replace('/', '--')}"
    pinned = _read_pins(pins_file).get(key)
    revision = pinned.revision if pinned else None
    cached = try_to_load_from_cache(repository, file, cache, revision)
    if isinstance(cached, str):
        path = Path(cached)
    elif download:
        path = _download(name, repository, file, revision, pins_file, repository_folder, endpoint)
    else:
        problem = "the weights of this backbone are not on this machine"
        raise MissingData(name, problem, f"Download them with --backbone {name}.")
    # The path is <repository_folder>/snapshots/<commit>/<file>.
    actual = Pin(path.relative_to(repository_folder / "snapshots").parts[0], file_sha256(path))
    declared = _declared_sha256(path)
    if declared is not None and declared != actual.sha256:
        remedy = f"The download is damaged: delete {repository_folder} and try again."
        raise HashMismatch(str(path), declared, actual.sha256, remedy)
    pin = pinned or _pin(pins_file, key, actual)
    if pin.sha256 != actual.sha256:
        remedy = (
            f"It differs from the file that was used first, which is pinned in {pins_file}. Delete "
            f"{repository_folder} to download that one again or, if you trust the new file, remove "
            f"the entry '{key}' from {pins_file.name}."
        )
        raise HashMismatch(str(path), pin.sha256, actual.sha256, remedy)
    return path, pin


def _download(
    name: str,
    repository: str,
    file: str,
    revision: str | None,
    pins_file: Path,
    repository_folder: Path,
    endpoint: str | None,
) -> Path:
    from huggingface_hub import hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RevisionNotFoundError

    cache = repository_folder.parent
    url = hf_hub_url(repository, file, revision=revision, endpoint=endpoint)
    try:
        request_metadata(url)
        return Path(
            hf_hub_download(repository, file, revision=revision, cache_dir=cache, endpoint=endpoint)
        )
    # huggingface_hub, its HTTP library and its transfer backend share no narrower base class.
    except Exception as error:
        cause = _summary(error)
        if isinstance(error, RevisionNotFoundError):
            cause += (
                f"; to use another commit than the pinned one, remove its entry from {pins_file}"
            )
        raise BackboneUnavailable(name, url, repository_folder, cause) from error


def _summary(error: BaseException) -> str:
    """Summarise an error of huggingface_hub, or its cause, in one line."""
    origin = error.__cause__ or error
    lines = [line.strip() for line in str(origin).splitlines() if line.strip()]
    return f"{type(origin).__name__}: {' '.join(lines[:2])}" if lines else type(origin).__name__


def _declared_sha256(path: Path) -> str | None:
    """Return the sha256 the hub declared for a large file: its cache names the content after it."""
    if not path.is_symlink():
        return None
    target = Path(os.readlink(path)).name
    return target if re.fullmatch(r"[0-9a-f]{64}", target) else None


def _read_pins(pins_file: Path) -> dict[str, Pin]:
    if not pins_file.exists():
        return {}
    try:
        entries = json.loads(pins_file.read_text("utf-8"))
        return {key: Pin(str(pin["revision"]), str(pin["sha256"])) for key, pin in entries.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        problem = "is not a list of pinned backbones (if you delete it, they are pinned again)"
        raise CorruptFile(pins_file, problem) from error


def _pin(pins_file: Path, key: str, actual: Pin) -> Pin:
    """Pin a version unless another process has pinned one meanwhile; returns the pinned one."""
    from filelock import FileLock

    try:
        with FileLock(pins_file.with_suffix(".lock")):
            pins = _read_pins(pins_file)
            pin = pins.setdefault(key, actual)
            entries = {name: asdict(entry) for name, entry in sorted(pins.items())}
            write_atomically(pins_file, json.dumps(entries, indent=2).encode() + b"\n")
    except (OSError, NotImplementedError) as error:  # read-only, or a file system without locks
        log.warning("%s could not be written (%s): '%s' is not pinned", pins_file, error, key)
        return actual
    log.info("'%s' is pinned to commit %s, sha256 %s", key, pin.revision, pin.sha256)
    return pin
