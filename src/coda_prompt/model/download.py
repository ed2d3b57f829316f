"""Weights from the hub, pinned: what was fetched first is what is used ever after.

The commit and the sha256 of a file are recorded beside the hub's cache when it is first used. Later
uses ask for that commit and refuse any other content.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from coda_prompt.errors import BackboneUnavailable, CorruptFile, HashMismatch
from coda_prompt.storage.files import file_sha256, write_atomically

log = logging.getLogger(__name__)

RECORD = "coda-prompt-backbones.json"


@dataclass(frozen=True)
class Pin:
    """Which file of a repository: the commit it was fetched from and the hash of its bytes."""

    revision: str
    sha256: str


def fetch(
    name: str, repository: str, file: str, *, cache: Path | None, endpoint: str | None
) -> tuple[Path, Pin]:
    """The local path of a hub file, downloaded where it is not cached, and checked."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE if cache is None else cache).expanduser().resolve()
    record, key = folder / RECORD, f"{repository}/{file}"
    copies = folder / f"models--{repository.replace('/', '--')}"
    recorded = _read_record(record).get(key)
    path = _download(name, repository, file, recorded, record, copies, endpoint)
    # The hub's cache keeps a file at <copies>/snapshots/<commit>/<file>.
    found = Pin(path.relative_to(copies / "snapshots").parts[0], file_sha256(path))
    declared = _declared_sha256(path)
    if declared is not None and declared != found.sha256:
        remedy = f"The download is damaged: delete {copies} and try again."
        raise HashMismatch(str(path), declared, found.sha256, remedy)
    pin = recorded or _record(record, key, found)
    if pin.sha256 != found.sha256:
        remedy = (
            f"It is not the file first used, which {record} records. Delete {copies} to fetch that "
            f"one again, or, if you trust the new one, remove the entry '{key}' from the record."
        )
        raise HashMismatch(str(path), pin.sha256, found.sha256, remedy)
    return path, pin


def _download(
    name: str,
    repository: str,
    file: str,
    recorded: Pin | None,
    record: Path,
    copies: Path,
    endpoint: str | None,
) -> Path:
    from huggingface_hub import hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RevisionNotFoundError

    revision = recorded.revision if recorded else None
    try:
        return Path(
            hf_hub_download(
                repository, file, revision=revision, cache_dir=copies.parent, endpoint=endpoint
            )
        )
    # The hub's client, its HTTP library and its transfer backend share no narrower base class.
    except Exception as error:
        address = hf_hub_url(repository, file, revision=revision, endpoint=endpoint)
        cause = _summary(error)
        if isinstance(error, RevisionNotFoundError):
            cause += f"; to give up the recorded commit, remove its entry from {record}"
        raise BackboneUnavailable(name, address, copies, cause) from error


def _summary(error: BaseException) -> str:
    """One line about what went wrong below the hub's client, or in it."""
    origin = error.__cause__ or error
    lines = [line.strip() for line in str(origin).splitlines() if line.strip()]
    return f"{type(origin).__name__}: {' '.join(lines[:2])}" if lines else type(origin).__name__


def _declared_sha256(path: Path) -> str | None:
    """The hash the hub gave with a large file: its cache names the content after it."""
    if not path.is_symlink():
        return None
    content = Path(os.readlink(path)).name
    return content if re.fullmatch(r"[0-9a-f]{64}", content) else None


def _read_record(record: Path) -> dict[str, Pin]:
    if not record.exists():
        return {}
    try:
        entries = json.loads(record.read_text("utf-8"))
        return {key: Pin(str(pin["revision"]), str(pin["sha256"])) for key, pin in entries.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        problem = "is not a record of pinned backbones (if you delete it, they are pinned anew)"
        raise CorruptFile(record, problem) from error


def _record(record: Path, key: str, found: Pin) -> Pin:
    """Enter the pin, unless another process was faster; the pin that holds is returned."""
    from filelock import FileLock

    try:
        with FileLock(record.with_suffix(".lock")):
            pins = _read_record(record)
            pin = pins.setdefault(key, found)
            entries = {name: asdict(entry) for name, entry in sorted(pins.items())}
            write_atomically(record, json.dumps(entries, indent=2).encode() + b"\n")
    except (OSError, NotImplementedError) as error:  # a read-only folder, one without locks
        log.warning("%s could not be written (%s): '%s' is not pinned", record, error, key)
        return found
    log.info("'%s' is pinned to commit %s, sha256 %s", key, pin.revision, pin.sha256)
    return pin
