"""`coda shards`: write class folders and Hugging Face datasets as tar shards.

Each shard is built in memory and written as a whole. A state file next to the shards records the
progress, so that the same command resumes after an interruption.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_prompt.console import ProgressBar
from coda_prompt.data.folders import folder_source
from coda_prompt.data.hf_datasets import StreamedHubSplit, stream_hub_splits
from coda_prompt.data.resolve import parse_name
from coda_prompt.data.shard_index import PACKING_STATE
from coda_prompt.data.shards import CLASSES_FILE, SPLITS, parse_class_list
from coda_prompt.data.sources import FileSplit
from coda_prompt.errors import BadOption, MissingData
from coda_prompt.storage.files import as_json, write_atomically
from coda_prompt.storage.remote import RemotePath

Example = tuple[bytes, str, int]
"""Content of an image file, its extension, its class id."""


@dataclass(frozen=True)
class InputSplit:
    """A split to pack."""

    examples: Callable[[int], Iterator[Example]]
    """Yields the examples from a position on."""
    fingerprint: str
    """Changes when the images change."""
    total: int | None = None


def pack(data: str, out: str, megabytes: int) -> tuple[int, int]:
    """Write shards; image files are copied unchanged.

    Args:
        data: a folder of class folders (or of `train/` and `test/`), or `hub:owner/name`.
        out: an empty folder or a remote path.
        megabytes: maximum size of a shard.

    Returns:
        The number of shards and of images.

    Raises:
        BadOption: `out` is not empty.
        MissingData: the data cannot be read, or a split has no images.
    """
    kind, location = parse_name(data)
    names, splits = _open_hub(location) if kind == "hub" else _open_folder(data)
    class_list = "".join(f"{name}\n" for name in names).encode()
    if parse_class_list(class_list) != tuple(names):
        problem = f"a class has a name that cannot be written to {CLASSES_FILE}"
        raise MissingData(data, problem, "Rename it.")
    state = {name: split.fingerprint for name, split in splits.items()}
    job = {"data": data, "megabytes": megabytes, "classes": names, "state": state}
    target = _Target(out)
    done = _read_progress(target, job)

    def write_progress() -> None:
        target.put(PACKING_STATE, json.dumps({**job, "done": done}).encode())

    write_progress()
    with ProgressBar() as bar:
        for name, split in splits.items():
            shards, images = done.get(name, (0, 0))
            line = bar.add_task(f"writing {name}", total=split.total, completed=images)
            for group in _group_by_size(split.examples(images), megabytes << 20):
                target.put(f"{name}-{shards:06}.tar", _make_tar(group, images))
                shards, images = shards + 1, images + len(group)
                done[name] = (shards, images)
                write_progress()
                bar.update(line, completed=images)
            if not images:
                raise MissingData(data, f"there is no image for {name}", "Point at other data.")
    target.put(CLASSES_FILE, class_list)
    target.finish()
    return sum(shards for shards, _ in done.values()), sum(images for _, images in done.values())


def _open_folder(data: str) -> tuple[Sequence[str], dict[str, InputSplit]]:
    source = folder_source(data)

    def make_split(split: FileSplit) -> InputSplit:
        def examples(first: int) -> Iterator[Example]:
            for number in range(first, len(split)):
                path = Path(split.paths[number])
                yield path.read_bytes(), path.suffix.lower(), int(split.labels[number])

        return InputSplit(examples, split.fingerprint(), len(split))

    assert isinstance(source.train, FileSplit)
    assert isinstance(source.test, FileSplit)
    return source.class_names, {"train": make_split(source.train), "test": make_split(source.test)}


def _open_hub(name: str) -> tuple[Sequence[str], dict[str, InputSplit]]:
    names, streams = stream_hub_splits(name)

    def make_split(stream: StreamedHubSplit) -> InputSplit:
        def examples(first: int) -> Iterator[Example]:
            for content, label in stream.examples(first):
                yield content, ".jpg" if content.startswith(b"\xff\xd8") else ".png", label

        return InputSplit(examples, stream.fingerprint())

    return names, dict(zip(SPLITS, map(make_split, streams), strict=True))


class _Target:
    """A folder or remote path; the state file marks its shards as unfinished."""

    def __init__(self, out: str) -> None:
        self._is_remote = "://" in out
        url = out if self._is_remote else str(Path(out).expanduser().absolute())
        self._path = RemotePath(url, "coda shards")

    def state(self) -> bytes:
        if PACKING_STATE not in self.names():
            return b"{}"
        return self._path.call("cat_file", f"{self._path.root}/{PACKING_STATE}")

    def names(self) -> set[str]:
        root = self._path.root
        paths = self._path.call("ls", root, False) if self._path.call("exists", root) else []
        return {str(path).rpartition("/")[2] for path in paths}

    def clear(self) -> None:
        """Delete unfinished shards; a folder that `coda shards` did not start is an error."""
        names = self.names()
        if names and PACKING_STATE not in names:
            problem = f"{self._path.url} is not empty; use another folder"
            raise BadOption("coda shards", "out", problem)
        self._path.call("makedirs", self._path.root, True)
        for name in names:
            if name.endswith(".tar"):
                self._path.call("rm_file", f"{self._path.root}/{name}")

    def put(self, name: str, content: bytes) -> None:
        path = f"{self._path.root}/{name}"
        if self._is_remote:
            self._path.call("pipe_file", path, content)
        else:
            write_atomically(Path(path), content)

    def finish(self) -> None:
        self._path.call("rm_file", f"{self._path.root}/{PACKING_STATE}")


def _read_progress(target: _Target, job: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the finished shards and images of each split if an earlier run had the same job."""
    try:
        state = json.loads(target.state())
        counts = state.pop("done")
        done = {name: (int(shards), int(images)) for name, (shards, images) in counts.items()}
        names = target.names()
        consistent = all(
            0 < shards <= min(images, len(names))
            and all(f"{split}-{number:06}.tar" in names for number in range(shards))
            for split, (shards, images) in done.items()
        )
        if consistent and state == as_json(job):
            return done
    except (ValueError, TypeError, LookupError, AttributeError):
        pass
    target.clear()
    return {}


def _group_by_size(examples: Iterable[Example], max_bytes: int) -> Iterator[list[Example]]:
    """Group examples into shards of at most `max_bytes`, but at least one image each."""
    group: list[Example] = []
    group_bytes = 0
    for example in examples:
        size = len(example[0])
        if group and group_bytes + size > max_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(example)
        group_bytes += size
    if group:
        yield group


def _make_tar(group: Sequence[Example], first: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number, (image, extension, label) in enumerate(group, first):
            for suffix, content in ((extension, image), (".cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:09}{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
