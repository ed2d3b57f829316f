"""Hub datasets read with the real `datasets` package, from files and from a local HTTP hub."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import numpy as np
import pytest
from forked import Forked
from PIL import Image
from typer.testing import CliRunner

from coda_prompt.bench.config import load_benchmark
from coda_prompt.bench.inputs import load_source
from coda_prompt.cli import app
from coda_prompt.data import hf_datasets, packing
from coda_prompt.data.folders import folder_source
from coda_prompt.data.hf_datasets import hub_source, open_hub_split, stream_hub_splits
from coda_prompt.data.inputs import image_items
from coda_prompt.data.packing import pack
from coda_prompt.data.resolve import labelled
from coda_prompt.data.shards import shard_source
from coda_prompt.data.sources import Source
from coda_prompt.errors import BadImage, BadOption, MissingData, MissingExtra, WrongType

SIZES = {"train": 7, "test": 3}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def file(shade: int, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def write(folder: Path, **parts: dict[str, list[Any]]) -> Path:
    """As on the hub: a Parquet file for each split, with an image and two class columns."""
    import datasets

    features = datasets.Features(
        {
            "img": datasets.Image(),
            "coarse": datasets.ClassLabel(names=["x"]),
            "fine": datasets.ClassLabel(names=["a", "b"]),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    for part, columns in parts.items():
        all_columns = {"coarse": [0] * len(columns["fine"]), **columns}
        rows = datasets.Dataset.from_dict(all_columns, features=features)
        rows.to_parquet(folder / f"{part}-00000-of-00001.parquet")
    return folder


def part(count: int, first: int = 0) -> dict[str, list[Any]]:
    kinds = ["PNG", "JPEG"]
    images = [{"bytes": file(first + 10 * n, kinds[n % 2]), "path": None} for n in range(count)]
    return {"img": images, "fine": [n % 2 for n in range(count)]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    return write(folder, **{name: part(count, 5) for name, count in SIZES.items()})


def test_column_with_the_most_classes_is_used(dataset: Path) -> None:
    source = load_source(load_benchmark("pocket", [f"source=hub:{dataset}", "classes=2"]))
    assert source.class_names == ("a", "b")
    assert source.train.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert [source.train.image(n).getpixel((0, 0)) for n in (0, 2)] == [5, 25]
    assert len(source.test) == 3
    assert len(source.fingerprint()) == 64


def test_unsuitable_dataset_raises_a_readable_error(tmp_path: Path) -> None:
    train = part(2)
    only = write(tmp_path / "only", train=train)
    with pytest.raises(MissingData, match="does not have both splits train and test"):
        hub_source(str(only))
    with pytest.raises(MissingData, match=r"no split test \(but train\)"):
        open_hub_split(str(only), "test")
    validated = write(tmp_path / "validated", train=train, validation=part(1))
    assert len(hub_source(str(validated)).test) == 1
    broken = {"img": [{"bytes": b"no image", "path": None}, train["img"][1]], "fine": [0, 1]}
    source = hub_source(str(write(tmp_path / "broken", train=train, test=broken)))
    with pytest.raises(BadImage, match=r"broken/test\[0\]"):
        source.test.image(0)
    with pytest.raises(MissingData, match=r"hub:owner/other: .*Check its name"):
        hub_source("owner/other")
    import datasets

    words = tmp_path / "words"
    words.mkdir()
    for name in SIZES:
        datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(words / f"{name}-0-of-1.parquet")
    for read in (hub_source, stream_hub_splits):
        with pytest.raises(MissingData, match="an image and a class column"):
            read(str(words))


def test_without_a_network_an_uncached_dataset_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)  # between retries
    with pytest.raises(MissingData, match=r"hub cannot be reached: .*Check its name"):
        hub_source("owner/other")
    assert not waits
    assert not caplog.records
    assert datasets.config.HF_HUB_OFFLINE is False


def rows_of(labels: list[Any], kind: Any, **more: Any) -> Any:
    """A dataset in memory, with the column `label`."""
    import datasets

    columns = {"img": part(len(labels), 5)["img"], "label": labels, **more}
    features = {"img": datasets.Image(), "label": kind}
    features |= {name: datasets.Value("string") for name in more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_names_of_classes_as_strings_are_accepted() -> None:
    import datasets

    rows = rows_of(["pear", "apple", "pear"], datasets.Value("string"))
    images = labelled(rows)
    assert images.names == ("apple", "pear")
    assert images.split.labels.tolist() == [1, 0, 1]
    captioned = rows_of(["pear", "apple"], datasets.Value("string"), caption=["x", "y"])
    assert labelled(captioned).names == ("apple", "pear")
    ambiguous = captioned.rename_column("label", "name")
    with pytest.raises(MissingData, match=r"no class column .* img, name, caption.*class_encode"):
        labelled(ambiguous)
    with pytest.raises(MissingData, match="image 1 has no class"):
        labelled(rows_of(["pear", None], datasets.Value("string")))
    with pytest.raises(MissingData, match="image 0 has no class"):
        labelled(rows_of([-1, 0], datasets.ClassLabel(names=["a"])))


def test_iterable_dataset_is_read_and_dataset_dict_is_refused() -> None:
    import datasets

    rows = rows_of([1, 0, 1], datasets.ClassLabel(names=["a", "b"]))
    images = labelled(rows.to_iterable_dataset())
    assert images.names == ("a", "b")
    assert images.split.labels.tolist() == [1, 0, 1]
    assert images.split.image(0).getpixel((0, 0)) == 5
    assert len(image_items(rows.to_iterable_dataset())) == 3
    both = datasets.DatasetDict(train=rows, test=rows)
    for read in (labelled, image_items):
        with pytest.raises(WrongType, match=r"DatasetDict .*data\['train'\], data\['test'\]"):
            read(both)


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'coda-prompt\[datasets\]'"):
        hub_source("owner/name")


# -- packing into shards


def assert_same(found: Source, expected: Source) -> None:
    assert found.class_names == expected.class_names
    for mine, other in ((found.train, expected.train), (found.test, expected.test)):
        assert mine.labels.tolist() == other.labels.tolist()
        for number in range(len(other)):
            assert np.array_equal(np.asarray(mine.image(number)), np.asarray(other.image(number)))


def small_shards(patched: pytest.MonkeyPatch) -> None:
    group_by_size = packing._group_by_size
    patched.setattr(packing, "_group_by_size", lambda examples, _: group_by_size(examples, 1_000))


def test_shards_of_a_dataset_equal_the_dataset(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)
    shards, images = pack(f"hub:{dataset}", str(tmp_path / "out"), 1)
    assert (shards > 2, images) == (True, 10)
    assert not list(tmp_path.rglob("*.arrow")), "nothing is kept on the disk"
    assert_same(shard_source(str(tmp_path / "out")), hub_source(str(dataset)))


@pytest.mark.parametrize("out", ["folder", "memory://shards-of-the-hub"])
def test_packing_resumes_after_an_interruption(
    out: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)
    place = out if "://" in out else str(tmp_path / out)
    pack(f"hub:{dataset}", str(tmp_path / "whole"), 1)
    written = interrupt_after(2, monkeypatch, f"hub:{dataset}", place)
    with pytest.raises(MissingData):
        shard_source(place)
    started: list[int] = []
    skipped = hf_datasets.StreamedHubSplit.examples
    with monkeypatch.context() as patched:
        patched.setattr(
            hf_datasets.StreamedHubSplit,
            "examples",
            lambda self, first: (started.append(first), skipped(self, first))[1],
        )
        pack(f"hub:{dataset}", place, 1)
    assert started[0] > written[1] > 0
    files, root = fsspec.core.url_to_fs(place)
    for name in os.listdir(tmp_path / "whole"):
        whole = (tmp_path / "whole" / name).read_bytes()
        assert files.cat_file(f"{root}/{name}") == whole, name
    names = {os.path.basename(path) for path in files.ls(root, detail=False)}
    assert names == set(os.listdir(tmp_path / "whole"))
    with pytest.raises(BadOption, match="is not empty"):
        pack(f"hub:{dataset}", place, 1)


def test_packing_other_data_starts_over(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)

    def full(_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patched:
        patched.setattr(packing._Target, "finish", full)
        with pytest.raises(OSError, match="full"):
            pack(f"hub:{dataset}", str(tmp_path / "out"), 1)
    shutil.copytree(dataset, tmp_path / "other")
    write(tmp_path / "other", train=part(4, 50))
    pack(f"hub:{tmp_path / 'other'}", str(tmp_path / "out"), 1)
    assert_same(shard_source(str(tmp_path / "out")), hub_source(str(tmp_path / "other")))


@pytest.mark.parametrize("note", [None, b"", b'{"data": "hu', b"[1]"])
def test_packing_to_a_remote_path_resumes_after_any_interruption(
    note: bytes | None, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the first shard, or while writing the state file."""
    small_shards(monkeypatch)
    out = tmp_path / "out"
    interrupt_after(0, monkeypatch, f"hub:{dataset}", f"file://{out}")
    if note is not None:
        (out / "train-000099.tar").write_bytes(b"left over")
        (out / "packing.json").write_bytes(note)
    pack(f"hub:{dataset}", f"file://{out}", 1)
    assert_same(shard_source(str(out)), hub_source(str(dataset)))


def interrupt_after(count: int, patched: pytest.MonkeyPatch, data: str, out: str) -> list[int]:
    """Interrupt packing after `count` shards; returns the first image of each."""
    make_tar = packing._make_tar
    written: list[int] = []

    def interrupt(group: Any, first: int) -> bytes:
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(first)
        return make_tar(group, first)

    with patched.context() as inner:
        inner.setattr(packing, "_make_tar", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(data, out, 1)
    return written


def test_packing_a_changed_folder_starts_over(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)
    shutil.copytree(tiny.parent / "data", tmp_path / "data")
    interrupt_after(2, monkeypatch, str(tmp_path / "data"), str(tmp_path / "out"))
    (tmp_path / "data/train/a/5.png").rename(tmp_path / "data/train/a/00.png")
    pack(str(tmp_path / "data"), str(tmp_path / "out"), 1)
    expected = folder_source(tmp_path / "data")
    assert_same(shard_source(str(tmp_path / "out")), expected)


@pytest.mark.parametrize("done", [{"train": [1, -7]}, {"train": [10**15, 10**15]}, {"x": [1, 1]}])
def test_inconsistent_packing_state_is_ignored(
    done: object, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_shards(monkeypatch)
    interrupt_after(2, monkeypatch, f"hub:{dataset}", str(tmp_path / "out"))
    note = tmp_path / "out" / "packing.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "done": done}))
    pack(f"hub:{dataset}", str(tmp_path / "out"), 1)
    assert_same(shard_source(str(tmp_path / "out")), hub_source(str(dataset)))


def test_class_names_are_packed_unchanged(tiny: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        folder = tmp_path / "data" / part
        shutil.copytree(tiny.parent / "data" / part, folder)
        (folder / "a").rename(folder / " a")
        (folder / "f").rename(folder / "f ")
    pack(str(tmp_path / "data"), str(tmp_path / "out"), 1)
    found = shard_source(str(tmp_path / "out"))
    assert found.class_names == folder_source(tmp_path / "data").class_names


def test_byte_order_mark_in_a_class_name_is_rejected(tmp_path: Path) -> None:
    import datasets

    marked = datasets.Features(
        {"img": datasets.Image(), "fine": datasets.ClassLabel(names=["\ufeffa", "b"])}
    )
    (tmp_path / "marked").mkdir()
    for name in SIZES:
        rows = datasets.Dataset.from_dict(part(2), features=marked)
        rows.to_parquet(tmp_path / "marked" / f"{name}-00000-of-00001.parquet")
    with pytest.raises(MissingData, match=r"cannot be written to classes\.txt"):
        pack(f"hub:{tmp_path / 'marked'}", str(tmp_path / "out"), 1)


def test_packing_to_memory_is_rejected(dataset: Path) -> None:
    ended = CliRunner().invoke(app, ["shards", f"hub:{dataset}", "memory://x"])
    assert isinstance(ended.exception, BadOption)


def test_images_without_a_class_are_rejected(tmp_path: Path) -> None:
    unknown = write(tmp_path / "unknown", train=part(2), test={**part(1), "fine": [-1]})
    with pytest.raises(MissingData, match=r"unknown/test.*image 0 has no class"):
        pack(f"hub:{unknown}", str(tmp_path / "out"), 1)


# -- from a hub


@pytest.fixture
def endpoint(dataset: Path, tmp_path: Path) -> Iterator[str]:
    """Two repositories: the dataset's Parquet files, and tar shards of it."""
    pack(f"hub:{dataset}", str(tmp_path / "shards"), 1)
    folders = {"owner/rows": dataset, "owner/shards": tmp_path / "shards"}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            name = next((name for name in folders if f"datasets/{name}" in path), None)
            if name is None:
                self.send(404, {"X-Error-Code": "RepoNotFound"}, b"")
                return
            files = {own.name: own for own in folders[name].iterdir() if own.name[0] != "."}
            if "/resolve/" in path:
                self.give(files, path.rpartition("/")[2])
            elif "/tree/" in path:
                self.tell([self.described(own) for own in files.values()])
            else:
                siblings = [{"rfilename": own} for own in files]
                self.tell({"id": name, "sha": "1" * 40, "siblings": siblings, "private": False,
                           "disabled": False, "gated": False, "downloads": 0, "likes": 0,
                           "tags": []})  # fmt: skip

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = next(name for name in folders if f"datasets/{name}" in self.path)
            paths = [folders[name] / path for path in asked["paths"]]
            self.tell([self.described(path) for path in paths if path.is_file()])

        @staticmethod
        def described(own: Path) -> dict[str, Any]:
            size = own.stat().st_size
            return {"type": "file", "path": own.name, "size": size, "oid": str(size)}

        def give(self, files: dict[str, Path], name: str) -> None:
            if name not in files:
                self.send(404, {"X-Error-Code": "EntryNotFound"}, b"")
                return
            content, status = files[name].read_bytes(), 200
            headers = {"ETag": f'"{name}"', "X-Repo-Commit": "1" * 40, "Accept-Ranges": "bytes"}
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                end = min(int(last or len(content)) + 1, len(content))
                headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
                content, status = content[int(first) : end], 206
            self.send(status, headers, content)

        def tell(self, answer: object) -> None:
            content = json.dumps(answer).encode()
            self.send(200, {"Content-Type": "application/json"}, content)

        def send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import sys, hashlib
from coda_prompt.bench.inputs import load_source
from coda_prompt.bench.config import load_benchmark
from coda_prompt.data.packing import pack
*packing, source = sys.argv[1:]
if packing:
    pack(*packing, 1)
found = load_source(load_benchmark("pocket", [f"source={source}", "classes=2"]))
for split in (found.train, found.test):
    print(split.labels.tolist(), *(int(split.image(n).getpixel((0, 0))) for n in range(len(split))))
"""


def test_datasets_and_shards_are_read_from_a_local_hub(
    endpoint: str, dataset: Path, tmp_path: Path
) -> None:
    def printed(*arguments: str) -> str:
        own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1",
               "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
        finished = Forked(SCRIPT, *arguments, environment={**os.environ, **own}).completed()
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    source = hub_source(str(dataset))
    expected = ""
    for split in (source.train, source.test):
        shades = [str(split.image(n).getpixel((0, 0))) for n in range(len(split))]
        expected += f"{split.labels.tolist()} {' '.join(shades)}\n"
    assert printed("shards:hf://datasets/owner/shards") == expected
    assert printed("hub:owner/rows") == expected
    packed = tmp_path / "packed"
    assert printed("hub:owner/rows", str(packed), f"shards:{packed}") == expected
