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

from rich.progress import TimeRemainingColumn

from coda_prompt.console import ProgressBar, stderr_console
from coda_prompt.data.folders import folder_source
from coda_prompt.data.hf_datasets import StreamedHubSplit, stream_hub_splits
from coda_prompt.data.resolve import parse_name
from coda_prompt.data.shard_index import PACKING_STATE
from coda_prompt.data.shards import CLASSES_FILE, SPLITS, parse_class_list
from coda_prompt.data.sources import FileSplit
from coda_prompt.errors import BadOption, MissingData
from coda_prompt.storage.files import write_atomically
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
    job = {
        "data": data,
        "megabytes": megabytes,
        "classes": names,
        "state": {name: split.fingerprint for name, split in splits.items()},
    }
    target = (
        _RemoteTarget(out) if "://" in out else _FolderTarget(Path(out).expanduser().absolute())
    )
    done = _read_progress(target, job)

    def write_progress() -> None:
        target.put(PACKING_STATE, json.dumps({**job, "done": done}).encode())

    write_progress()
    with ProgressBar(stderr_console(), TimeRemainingColumn()) as bar:
        for name, split in splits.items():
            shards, images = done.get(name, (0, 0))
            line = bar.bar.add_task(f"writing {name}", total=split.total, completed=images)
            for group in _group_by_size(split.examples(images), megabytes << 20):
                target.put(f"{name}-{shards:06}.tar", _make_tar(group, images))
                shards, images = shards + 1, images + len(group)
                done[name] = (shards, images)
                write_progress()
                bar.bar.update(line, completed=images)
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


class _FolderTarget:
    """A local folder, created under another name and renamed when all shards are written."""

    def __init__(self, out: Path) -> None:
        self._out, self._unfinished = out, out.with_name(f".{out.name}.making")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise _not_empty(str(out))
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def state(self) -> bytes | None:
        path = self._unfinished / PACKING_STATE
        return path.read_bytes() if path.exists() else None

    def names(self) -> set[str]:
        return {path.name for path in self._unfinished.iterdir()}

    def clear(self) -> None:
        for path in self._unfinished.iterdir():
            path.unlink()

    def put(self, name: str, content: bytes) -> None:
        write_atomically(self._unfinished / name, content)

    def finish(self) -> None:
        (self._unfinished / PACKING_STATE).unlink()
        if self._out.exists():
            self._out.rmdir()
        self._unfinished.replace(self._out)


class _RemoteTarget:
    """A remote path; the state file marks shards as unfinished."""

    def __init__(self, out: str) -> None:
        self._remote = RemotePath(out, "coda shards")

    def state(self) -> bytes | None:
        try:
            content: bytes = self._remote.call("cat_file", f"{self._remote.root}/{PACKING_STATE}")
            return content
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        root = self._remote.root
        paths = self._remote.call("ls", root, False) if self._remote.call("exists", root) else []
        return {str(path).rpartition("/")[2] for path in paths}

    def clear(self) -> None:
        """Delete unfinished shards; a folder that `coda shards` did not start is an error."""
        names = self.names()
        if names and PACKING_STATE not in names:
            raise _not_empty(self._remote.url)
        self._remote.call("makedirs", self._remote.root, True)
        for name in names:
            if name.endswith(".tar"):
                self._remote.call("rm_file", f"{self._remote.root}/{name}")

    def put(self, name: str, content: bytes) -> None:
        self._remote.call("pipe_file", f"{self._remote.root}/{name}", content)

    def finish(self) -> None:
        self._remote.call("rm_file", f"{self._remote.root}/{PACKING_STATE}")


def _not_empty(out: str) -> BadOption:
    return BadOption("coda shards", "out", f"{out} is not empty; use another folder")


def _read_progress(
    target: _FolderTarget | _RemoteTarget, job: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    """Return the finished shards and images of each split if an earlier run had the same job."""
    try:
        state = json.loads(target.state() or b"{}")
        done = {
            split: (int(counts[0]), int(counts[1])) for split, counts in state.pop("done").items()
        }
        names = target.names()
        consistent = all(0 < shards <= min(images, len(names)) for shards, images in done.values())
        consistent = consistent and all(
            f"{split}-{number:06}.tar" in names
            for split, (shards, _) in done.items()
            for number in range(shards)
        )
        if consistent and state == json.loads(json.dumps(job)):
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
