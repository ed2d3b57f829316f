"""Tar shards contain the same images as the folder they were made from."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from forked import Forked
from small import coda

from coda_prompt import ContinualClassifier
from coda_prompt.data import packing, shard_index
from coda_prompt.data.folders import folder_source
from coda_prompt.data.packing import pack
from coda_prompt.data.shards import shard_source
from coda_prompt.data.sources import Source
from coda_prompt.data.stream import make_stream
from coda_prompt.errors import BadImage, BadOption, CorruptFile, MissingData
from coda_prompt.preprocessing import Preprocessing
from coda_prompt.storage.tensors import read_tensors
from coda_prompt.training.loading import Epoch, Views, batches

VIEWS = Views(Preprocessing(16, 1, (0.5,), (0.5,), "bilinear"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tiny: Path) -> Path:
    return tiny.parent / "data"


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, smaller than the command makes them."""
    out = tmp_path_factory.mktemp("shards")
    group_by_size = packing._group_by_size
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            packing, "_group_by_size", lambda examples, _: group_by_size(examples, 2_000)
        )
        written, images = pack(str(folder), str(out), 1)
    assert written > 4
    assert images == len(list(folder.rglob("*.png")))
    return out


def stream_of(source: Source, rank: int, world: int, workers: int) -> list[Any]:
    """All batches of one process: two augmented epochs of each task, and its test images."""
    seen = []
    for task in make_stream(source, tasks=3, seed=1).tasks:
        order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0)).tolist()
        whole = [order[first : first + 5] for first in range(0, len(order), 5)]
        shares = [batch[rank::world] for batch in whole]
        for epoch in range(2):
            key = Epoch(0, task.index, epoch)
            seen += list(batches(task.train, VIEWS, shares, epoch=key, workers=workers))
        tests = [list(range(rank, len(task.test), world))]
        seen += list(batches(task.test, VIEWS, tests, workers=workers))
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_batches_equal_those_of_the_folder(
    rank: int, world: int, workers: int, folder: Path, packed: Path
) -> None:
    expected = stream_of(folder_source(folder), rank, world, 0)
    found = stream_of(shard_source(str(packed)), rank, world, workers)
    assert len(found) == len(expected) > 6
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine.images, other.images)
        assert torch.equal(mine.labels, other.labels)
        assert mine.positions == other.positions


def test_benchmark_on_shards_gives_the_same_numbers(
    tiny: Path, packed: Path, tiny_runs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    more = ("--set", f"source=shards:{packed}", "--set", "training.workers=2", "--json")
    finished = coda("bench", str(tiny), "--out", str(tmp_path), *more)
    assert finished.returncode == 0, finished.stderr
    for path in sorted(tmp_path.rglob("result.json")):
        expected = json.loads((tiny_runs[0] / path.relative_to(tmp_path)).read_text())
        found = json.loads(path.read_text())
        for field in ("matrix", "losses", "learned_sha256", "class_names"):
            assert found[field] == expected[field]


@pytest.mark.posix
def test_classifier_learns_from_shards(drawing_folders: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for part, origin in (("train", "task-1"), ("test", "task-2")):
        (tmp_path / "data" / part).symlink_to(drawing_folders / origin)
    with pytest.raises(MissingData, match="different classes"):
        pack(str(tmp_path / "data"), str(tmp_path / "out"), 1)
    finished = coda("shards", str(drawing_folders / "task-1"), str(tmp_path / "out"))
    assert finished.returncode == 0, finished.stderr
    assert "2 shards" in finished.stderr
    source = folder_source(drawing_folders / "task-1")
    classifier, other = ContinualClassifier(), ContinualClassifier()
    classifier.learn(f"shards:{tmp_path / 'out'}")
    train: Any = source.train
    other.learn(train.paths, [source.class_names[label] for label in train.labels])
    assert classifier.classes_ == other.classes_
    assert classifier.evaluate(f"shards:{tmp_path / 'out'}").images == len(source.test)
    test: Any = source.test
    paths = list(test.paths)
    assert np.array_equal(classifier.predict_proba(paths), other.predict_proba(paths))


def test_index_is_cached_and_checked(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shard_source(str(packed))
    index = packed / shard_index.INDEX_NAME.format("train")
    content = index.read_bytes()

    def check_cached() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(shard_index, "build_index", lambda *_: pytest.fail("built again"))
            assert shard_source(str(packed)).fingerprint() == first.fingerprint()

    check_cached()
    renamed = content.replace(b"train-000000", b"train-000009")
    damaged = [content[:-3], content[:5], b"", b"x" * 100, renamed]
    label = bytearray(content)
    label[-9 * len(first.train) :] = b"\xff" * (9 * len(first.train))  # far outside the shards
    for content in (*damaged, bytes(label)):
        index.write_bytes(content)
        assert shard_source(str(packed)).fingerprint() == first.fingerprint()
        check_cached()


def test_remote_shards_equal_local_ones(packed: Path, tmp_path: Path) -> None:
    """At any URL of fsspec; the index is in the user's cache."""
    memory = fsspec.filesystem("memory")
    for path in packed.glob("*.*"):
        if not path.name.startswith("."):
            memory.pipe(f"/there/{path.name}", path.read_bytes())
    found, local = shard_source("memory://there"), shard_source(str(packed))
    assert found.class_names == local.class_names
    for index in range(len(local.train)):
        assert found.train.image(index).tobytes() == local.train.image(index).tobytes()
    assert len(list((tmp_path / "cache" / "coda-prompt").iterdir())) == 2
    memory.rm("/there/train-000000.tar")
    with pytest.raises(BadImage, match="cannot be read"):
        found.train.image(0)


def tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def an_image(folder: Path) -> bytes:
    return (folder / "train" / "a" / "0.png").read_bytes()


@pytest.mark.parametrize("how", ["json", "cls", "folders", "numbers"])
def test_webdataset_layouts_are_read(how: str, folder: Path, tmp_path: Path) -> None:
    image = an_image(folder)
    files: dict[str, dict[str, bytes]] = {
        "json": {"0.png": image, "0.json": b'{"label": "cat"}', "x/1.png": image,
                 "x/1.json": b'{"cls": "dog"}'},
        "cls": {"0.png": image, "0.cls": b"cat\n", "1.seg.png": image, "1.cls": b"dog"},
        "folders": {"some/cat/0.png": image, "dog/1.png": image, "dog/notes.txt": b"no"},
        "numbers": {"0.png": image, "0.cls": b"10", "1.png": image, "1.cls": b"9"},
    }  # fmt: skip
    for part in ("train", "test"):
        tar(tmp_path / f"{part}-0.tar", files[how])
    source = shard_source(str(tmp_path))
    assert source.class_names == (("9", "10") if how == "numbers" else ("cat", "dog"))
    assert len(source.train) == len(source.test) == 2
    assert source.train.image(0).size == (16, 16)


def test_invalid_shards_raise_readable_errors(folder: Path, tmp_path: Path) -> None:
    image = an_image(folder)
    with pytest.raises(MissingData, match=r"there is no train-\*.tar"):
        shard_source(str(tmp_path))
    with pytest.raises(MissingData, match="cannot be read"):
        shard_source("no-such-protocol://place")
    tar(tmp_path / "train-0.tar", {"0.png": image, "0.cls": b"1"})
    with pytest.raises(MissingData, match=r"there is no test-\*.tar"):
        shard_source(str(tmp_path))
    for content, problem in (
        ({"0.png": image}, "has no label for '0'"),
        ({"0.png": image, "0.cls": b"a\nb"}, "has no label for '0'"),
        ({"0.png": image, "0.cls": b"\xff"}, "is not a label"),
        ({"0.png": image, "0.json": b"[" * 9999}, "is not a label"),
        ({"0.png": image, "0.cls": b"1" * 70_000}, "is not a label"),
    ):
        tar(tmp_path / "test-0.tar", content)
        with pytest.raises(CorruptFile, match=problem):
            shard_source(str(tmp_path))
    tar(tmp_path / "test-0.tar", {"0.cls": b"1"})
    with pytest.raises(MissingData, match="no image"):
        shard_source(str(tmp_path))
    for damaged in (b"", b"not a tar file" * 100):
        (tmp_path / "test-0.tar").write_bytes(damaged)
        with pytest.raises((CorruptFile, MissingData)):
            shard_source(str(tmp_path))
    tar(tmp_path / "test-0.tar", {"0.png": b"no image", "0.cls": b"1"})
    with pytest.raises(BadImage, match="none of the formats"):
        shard_source(str(tmp_path)).test.image(0)
    (tmp_path / "classes.txt").write_text("only one\n")
    with pytest.raises(CorruptFile, match="has 1 names, but there is a class 1"):
        shard_source(str(tmp_path))
    with pytest.raises(BadOption, match="is not empty"):
        pack(str(folder), str(tmp_path), 1)


def test_index_of_a_read_only_folder_is_in_the_user_cache(packed: Path, tmp_path: Path) -> None:
    """The index is then in the user's cache."""
    program = (
        "import sys, pathlib\n"
        "from coda_prompt.data import shard_index, shards\n"
        "write = shard_index.write_tensors\n"
        "def refuse(path, *content):\n"
        "    if str(path).startswith(sys.argv[1]): raise PermissionError(13, 'no', str(path))\n"
        "    write(path, *content)\n"
        "shard_index.write_tensors = refuse\n"
        "print(len(shards.shard_source(sys.argv[1]).train))\n"
    )
    for part in ("train", "test"):
        (packed / shard_index.INDEX_NAME.format(part)).unlink(missing_ok=True)
    found = Forked(program, str(packed)).completed()
    assert found.stdout.strip() == "36", found.stderr
    assert len(list((tmp_path / "cache" / "coda-prompt").iterdir())) == 2


def both(folder: Path, files: dict[str, bytes]) -> None:
    for part in ("train", "test"):
        tar(folder / f"{part}-0.tar", files)


def test_damaged_or_truncated_tar_is_rejected(folder: Path, tmp_path: Path) -> None:
    """Python's tarfile treats a damaged or missing header as the end of the archive."""
    image = an_image(folder)
    files = {f"{name}/{place}.png": image for name in ("cat", "dog") for place in range(3)}
    both(tmp_path, files)
    whole = (tmp_path / "test-0.tar").read_bytes()
    size = 512 + -(-len(image) // 512) * 512
    flipped = bytearray(whole)
    flipped[3 * size + 5] ^= 1  # in the header of the fourth
    for damaged in (bytes(flipped), whole[: 2 * size], whole[: 2 * size + 100]):
        (tmp_path / "test-0.tar").write_bytes(damaged)
        with pytest.raises(CorruptFile, match="damaged or truncated"):
            shard_source(str(tmp_path))


@pytest.mark.parametrize("size", ["99999999999999999999", "-512", "100000"])
def test_impossible_member_size_is_rejected(size: str, folder: Path, tmp_path: Path) -> None:
    image = an_image(folder)
    both(tmp_path, {"cat/0.png": image})
    with tarfile.open(tmp_path / "test-0.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("cat/0.png")
        member.size, member.pax_headers = len(image), {"size": size}
        archive.addfile(member, io.BytesIO(image))
    with pytest.raises(CorruptFile, match=r"test|shards"):
        shard_source(str(tmp_path))


def test_sparse_member_is_rejected(folder: Path, tmp_path: Path) -> None:
    both(tmp_path, {"cat/0.png": an_image(folder)})
    header = bytearray((tmp_path / "test-0.tar").read_bytes())
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[257:265] = b"ustar  \0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    (tmp_path / "test-0.tar").write_bytes(header)
    with pytest.raises(CorruptFile, match="is sparse"):
        shard_source(str(tmp_path))


def test_changed_shard_of_the_same_size_is_detected(folder: Path, tmp_path: Path) -> None:
    image = an_image(folder)
    both(tmp_path, {"0.png": image, "0.cls": b"cat", "1.png": image, "1.cls": b"dog"})
    before = shard_source(str(tmp_path))
    tar(
        tmp_path / "train-0.tar", {"0.png": image, "0.cls": b"dog", "1.png": image, "1.cls": b"cat"}
    )
    after = shard_source(str(tmp_path))
    assert before.train.labels.tolist() == [0, 1]
    assert after.train.labels.tolist() == [1, 0]
    assert after.fingerprint() != before.fingerprint()


def test_unusual_names_and_labels(folder: Path, tmp_path: Path) -> None:
    image = an_image(folder)
    both(tmp_path, {f"cat/2021.{day}.png": image for day in ("01", "02")} | {"./dog/a.png": image,
         "dog/a.jpg": image, "coco.json": b"[" * 70_000})  # fmt: skip
    source = shard_source(str(tmp_path))
    assert source.class_names == ("cat", "dog")
    assert len(source.train) == 4
    both(tmp_path, {"0.png": image, "0.cls": b"01", "1.png": image, "1.cls": b"1", "2.png": image,
                    "2.cls": b"0"})  # fmt: skip
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfcat\ndog\n")
    source = shard_source(str(tmp_path))
    assert source.class_names == ("cat", "dog")
    assert source.train.labels.tolist() == [1, 1, 0]
    (tmp_path / "classes.txt").write_text("\ncat\ndog\n")
    with pytest.raises(CorruptFile, match="one class name per line"):
        shard_source(str(tmp_path))
    both(tmp_path, {"0.png": image, "0.jpg": image, "0.cls": b"1"})
    with pytest.raises(CorruptFile, match="several images of '0'"):
        shard_source(str(tmp_path))
    for none in (b"null", b"true", b"false", b"1.5"):
        both(tmp_path, {"0.png": image, "0.json": b'{"label": %s}' % none})
        with pytest.raises(CorruptFile, match="has no label for"):
            shard_source(str(tmp_path))


def test_index_with_invalid_class_names_is_built_again(packed: Path) -> None:
    """Even if its hash is right."""
    names = shard_source(str(packed)).class_names
    path = packed / shard_index.INDEX_NAME.format("train")
    for invalid in (["\x1b]0;owned\x07", *"12345"], ["0"] * 6):
        description = read_tensors(path).description
        assert description is not None
        index = shard_index.read_index(path, description["shards"])
        assert index is not None
        forged = replace(index, names=tuple(invalid))
        shard_index.write_index(path, forged, description["shards"])
        assert shard_source(str(packed)).class_names == names


def test_folder_names_with_special_characters(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "a[1] * b::c"
    pack(str(folder), str(place), 1)
    assert len(shard_source(str(place)).train) == 36
