"""Class folders and hub datasets as tar shards, on a disk or behind an address.

One shard after another is put together in memory and written; a note beside them says how far the
work is, from which the same command goes on.
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
from coda_prompt.data.hf_datasets import PREFIX, StreamedHubSplit, stream_hub_splits
from coda_prompt.data.shards import CLASSES, NOTE, PARTS, parse_class_list
from coda_prompt.data.sources import FileSplit
from coda_prompt.errors import BadOption, MissingData
from coda_prompt.storage.files import write_atomically
from coda_prompt.storage.remote import RemotePath

Example = tuple[bytes, str, int]
"""An image's file, the ending of its name, its class."""


@dataclass(frozen=True)
class Part:
    examples: Callable[[int], Iterator[Example]]
    """From a number on."""
    state: str
    """What is another where the images are others."""
    total: int | None = None


def pack(data: str, out: str, megabytes: int) -> tuple[int, int]:
    """A folder of class folders (or train/ and test/ of them), or `hub:owner/name`; files go in as
    they are. Gives the number of shards and of images."""
    names, parts = _of_the_hub(data) if data.startswith(PREFIX) else _of_a_folder(data)
    listed = "".join(f"{name}\n" for name in names).encode()
    if parse_class_list(listed) != tuple(names):
        raise MissingData(data, "a class has a name that cannot be kept in a list", "Rename it.")
    state = {part: own.state for part, own in parts.items()}
    told = {"data": data, "megabytes": megabytes, "classes": names, "state": state}
    place = _Behind(out) if "://" in out else _Folder(Path(out).expanduser().absolute())
    done = _found(place, told)

    def note() -> None:
        place.put(NOTE, json.dumps({**told, "done": done}).encode())

    note()
    with ProgressBar(stderr_console(), TimeRemainingColumn()) as bar:
        for part, own in parts.items():
            shards, images = done.get(part, (0, 0))
            line = bar.bar.add_task(f"writing {part}", total=own.total, completed=images)
            for group in _groups(own.examples(images), megabytes << 20):
                place.put(f"{part}-{shards:06}.tar", _tar(group, images))
                shards, images = shards + 1, images + len(group)
                done[part] = (shards, images)
                note()
                bar.bar.update(line, completed=images)
            if not images:
                raise MissingData(data, f"there is no image for {part}", "Point at other data.")
    place.put(CLASSES, listed)
    place.finish()
    return sum(shards for shards, _ in done.values()), sum(images for _, images in done.values())


def _of_a_folder(data: str) -> tuple[Sequence[str], dict[str, Part]]:
    source = folder_source(data)

    def part(split: FileSplit) -> Part:
        def examples(first: int) -> Iterator[Example]:
            for number in range(first, len(split)):
                path = Path(split.paths[number])
                yield path.read_bytes(), path.suffix.lower(), int(split.labels[number])

        return Part(examples, split.fingerprint(), len(split))

    assert isinstance(source.train, FileSplit)
    assert isinstance(source.test, FileSplit)
    return source.class_names, {"train": part(source.train), "test": part(source.test)}


def _of_the_hub(data: str) -> tuple[Sequence[str], dict[str, Part]]:
    names, streams = stream_hub_splits(data.removeprefix(PREFIX))

    def part(stream: StreamedHubSplit) -> Part:
        def examples(first: int) -> Iterator[Example]:
            for content, label in stream.examples(first):
                yield content, ".jpg" if content.startswith(b"\xff\xd8") else ".png", label

        return Part(examples, stream.state)

    return names, dict(zip(PARTS, map(part, streams), strict=True))


# -- where shards go


class _Folder:
    """They appear all at once, when all are there."""

    def __init__(self, out: Path) -> None:
        self._out, self._making = out, out.with_name(f".{out.name}.making")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise _not_empty(str(out))
        self._making.mkdir(parents=True, exist_ok=True)

    def note(self) -> bytes | None:
        held = self._making / NOTE
        return held.read_bytes() if held.exists() else None

    def names(self) -> set[str]:
        return {path.name for path in self._making.iterdir()}

    def clear(self) -> None:
        for path in self._making.iterdir():
            path.unlink()

    def put(self, name: str, content: bytes) -> None:
        write_atomically(self._making / name, content)

    def finish(self) -> None:
        (self._making / NOTE).unlink()
        if self._out.exists():
            self._out.rmdir()
        self._making.replace(self._out)


class _Behind:
    """An address, where the note tells shards that are all there from those that are not yet."""

    def __init__(self, out: str) -> None:
        self._there = RemotePath(out, "coda shards")

    def note(self) -> bytes | None:
        try:
            held: bytes = self._there.call("cat_file", f"{self._there.root}/{NOTE}")
            return held
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        root = self._there.root
        listed = self._there.call("ls", root, False) if self._there.call("exists", root) else []
        return {str(path).rpartition("/")[2] for path in listed}

    def clear(self) -> None:
        """Of shards; what is no work of ours is not touched."""
        names = self.names()
        if names and NOTE not in names:
            raise _not_empty(self._there.url)
        self._there.call("makedirs", self._there.root, True)
        for name in names:
            if name.endswith(".tar"):
                self._there.call("rm_file", f"{self._there.root}/{name}")

    def put(self, name: str, content: bytes) -> None:
        self._there.call("pipe_file", f"{self._there.root}/{name}", content)

    def finish(self) -> None:
        self._there.call("rm_file", f"{self._there.root}/{NOTE}")


def _not_empty(out: str) -> BadOption:
    return BadOption("coda shards", "out", f"{out} is not empty; name another place")


def _found(place: _Folder | _Behind, told: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Shards and images of each part that are there from an earlier try with the same words."""
    try:
        held = json.loads(place.note() or b"{}")
        done = {part: (int(own[0]), int(own[1])) for part, own in held.pop("done").items()}
        names = place.names()
        fits = all(0 < shards <= min(images, len(names)) for shards, images in done.values())
        fits = fits and all(
            f"{part}-{number:06}.tar" in names
            for part, (shards, _) in done.items()
            for number in range(shards)
        )
        if fits and held == json.loads(json.dumps(told)):
            return done
    except (ValueError, TypeError, LookupError, AttributeError):
        pass
    place.clear()
    return {}


# -- shards


def _groups(examples: Iterable[Example], most: int) -> Iterator[list[Example]]:
    """What goes into one shard: no more bytes than that, but one image at least."""
    group: list[Example] = []
    held = 0
    for example in examples:
        size = len(example[0])
        if group and held + size > most:
            yield group
            group, held = [], 0
        group.append(example)
        held += size
    if group:
        yield group


def _tar(group: Sequence[Example], first: int) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for number, (content, ending, label) in enumerate(group, first):
            for name, own in ((ending, content), (".cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:09}{name}")
                member.size = len(own)
                archive.addfile(member, io.BytesIO(own))
    return held.getvalue()
