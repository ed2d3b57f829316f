"""The paper's datasets and benchmarks, on miniatures with the real structure and names."""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small import PAPER_METHODS, quick_options, tiny_vit
from typer.testing import CliRunner, Result

from coda_prompt.cli import app
from coda_prompt.errors import (
    BadOption,
    CorruptFile,
    MissingData,
    UnknownName,
)
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.images.sources import ArraySplit, FileSplit, Source, Split
from coda_prompt.research.bench.config import load_benchmark
from coda_prompt.research.bench.inputs import load_source, load_stream
from coda_prompt.research.bench.runs import runs_of
from coda_prompt.research.methods import METHODS
from coda_prompt.research.streams.paper import PAPER_DATASETS, cifar_pickle, paper_source
from coda_prompt.research.streams.paper.cifar_pickle import read_cifar_pickle
from coda_prompt.research.vit.catalog import write_weights
from coda_prompt.research.vit.vit import ViTConfig

PRESETS = (
    "cifar-100-10",
    "imagenet-r-5",
    "imagenet-r-10",
    "imagenet-r-20",
    "domainnet-5",
    "imagenet-r-dual-shift",
)
TYPES = (
    *("art", "cartoon", "deviantart", "embroidery", "graffiti", "graphic", "misc", "origami"),
    *("painting", "sculpture", "sketch", "sticker", "tattoo", "toy", "videogame"),
)
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
WNIDS = [f"n{1440000 + 977 * number:08d}" for number in range(200)]
LABELS = [(7 * number + 3) % 200 for number in range(200)]  # by wnid: not the sorted order


# --- miniatures ---


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Write what Python 2's cPickle wrote: byte strings and numpy's old module names."""

    def save_text(self, text: str | bytes) -> None:
        content = text.encode("latin-1") if isinstance(text, str) else text
        short = len(content) < 256
        size = struct.pack("<B" if short else "<i", len(content))
        self.write((pickle.SHORT_BINSTRING if short else pickle.BINSTRING) + size + content)
        self.memoize(text)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch = {**pickle._Pickler.dispatch, str: save_text, bytes: save_text}  # type: ignore[attr-defined] # noqa: RUF012


def python2_pickle(values: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(values)
    return file.getvalue()


def cifar_part(each: int, seed: int) -> dict[str, Any]:
    labels = [number % 100 for number in range(100 * each)]
    rows = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), np.uint8)
    return {
        "filenames": [f"image_s_{number:06d}.png" for number in range(len(labels))],
        "batch_label": "training batch 1 of 1",
        "fine_labels": labels,
        "coarse_labels": [label // 5 for label in labels],
        "data": rows,
    }


def cifar_meta() -> dict[str, Any]:
    return {
        "fine_label_names": [f"thing_{number:02d}" for number in range(100)],
        "coarse_label_names": [f"kind_{number:02d}" for number in range(20)],
    }


def write_cifar(root: Path, write: Callable[[Any], bytes] = python2_pickle, **parts: Any) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    contents = {"train": cifar_part(3, 0), "test": cifar_part(1, 1), "meta": cifar_meta(), **parts}
    for name, values in contents.items():
        (folder / name).write_bytes(write(values))
    return folder


def pack(folder: Path) -> Path:
    archive = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(folder, folder.name)
    return archive


def write_image(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (9, 8), (number % 256, 37 * number % 256, 90)).save(path)


def imagenet_r_files() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(path, label) of 3 training images and 1 test image per class, of all 15 types."""
    train, test = [], []
    for number, (wnid, label) in enumerate(zip(WNIDS, LABELS, strict=True)):
        for place in range(4):
            kind = TYPES[(number + 4 * place) % 15]
            (test if place == 3 else train).append((f"{wnid}/{kind}_{place}.jpg", label))
    order = np.random.default_rng(0).permutation(len(train))
    return [train[place] for place in order], test


def write_list(path: Path, images: list[tuple[str, int]]) -> None:
    fields = {
        "data": [f"data/imagenet-r/{file}" for file, _ in images],
        "targets": [label for _, label in images],
    }
    path.write_text(yaml.safe_dump(fields))


def write_imagenet_r(root: Path, lists: bool = True) -> None:
    train, test = imagenet_r_files()
    for number, (file, _) in enumerate([*train, *test]):
        write_image(root / "imagenet-r" / file, number)
    (root / "imagenet-r" / "README.txt").write_text("200 classes")
    if lists:
        write_list(root / "imagenet-r_train.yaml", train)
        write_list(root / "imagenet-r_test.yaml", test)


def write_domainnet(root: Path, classes: int = 345) -> None:
    folder = root / "domainnet"
    folder.mkdir(parents=True)
    lines: dict[str, list[str]] = {
        f"{domain}_{part}": [] for domain in DOMAINS for part in ("train", "test")
    }
    for label in range(classes):
        for place in range(3):
            domain = DOMAINS[(label + place) % 6]
            file = f"{domain}/thing {label:03d}/{domain}_{label:03d}_{place:06d}.jpg"
            write_image(folder / file, label)
            lines[f"{domain}_{'test' if place == 2 else 'train'}"].append(f"{file} {label}\n")
    for name, listed in lines.items():
        (folder / f"{name}.txt").write_text("".join(listed))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with all three datasets and a tiny ViT."""
    root = tmp_path_factory.mktemp("data")
    write_cifar(root)
    write_imagenet_r(root)
    write_domainnet(root)
    vit = tiny_vit(config=ViTConfig(16, 8, width=16, depth=6, heads=2, mlp_width=32))
    write_weights(root / "tiny.safetensors", vit, Preprocessing(size=16))
    return root


def coda(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(app, arguments)


def paths(split: Split) -> list[str]:
    assert isinstance(split, FileSplit)
    return ["/".join(Path(path).parts[-2:]) for path in split.paths]


def pixels(split: Split) -> np.ndarray:
    assert isinstance(split, ArraySplit)
    return split.images


# --- the benchmarks ---


def run_preset(
    name: str, chosen: str, data: Path, out: Path, *settings: str
) -> dict[str, dict[str, Any]]:
    """Run one trial of a preset with the tiny ViT; return the result of each method."""
    settings = (f"backbone={data / 'tiny.safetensors'}", "training.epochs=1", *settings)
    run = coda(
        "bench", name, "--methods", chosen, "--trials", "1", "--json", "--data", str(data),
        "--out", str(out), *(part for setting in settings for part in ("--set", setting)),
    )  # fmt: skip
    assert run.exit_code == 0, run.exception
    return {
        row["method"]: json.loads(
            (out / name / row["method"] / "trial-0" / "result.json").read_text()
        )
        for row in json.loads(run.stdout)["rows"]
    }


@pytest.mark.parametrize("name", ["imagenet-r-dual-shift", "domainnet-5"])
def test_preset_runs_end_to_end(name: str, data: Path, tmp_path: Path) -> None:
    results = run_preset(name, "dualprompt,coda-p,ncm", data, tmp_path)
    assert set(results) == {"dualprompt", "coda-p", "ncm"}
    for result in results.values():
        assert len(result["matrix"]) == load_benchmark(name).stream.tasks
        assert all(value is not None for value in result["matrix"][-1])
        assert len(result["class_names"]) == load_benchmark(name).classes
        assert len(set(result["tasks"])) == 1, "all tasks have as many classes"
        assert bool(result["untrained"]) == (name == "imagenet-r-dual-shift")


def test_every_method_runs_on_a_preset_of_the_paper(data: Path, tmp_path: Path) -> None:
    names = load_benchmark("cifar-100-10").methods
    short = [(method, option) for method in names for option in quick_options(method).items()]
    settings = [f"methods.{method}.options.{key}={value}" for method, (key, value) in short]
    settings += ["stream.tasks=2", "stream.train_images=1"]
    results = run_preset("cifar-100-10", "all", data, tmp_path, *settings)
    assert set(results) == set(METHODS)
    for method, result in results.items():
        assert len(result["class_names"]) == 100
        assert all(value is not None for value in result["matrix"][-1])
        assert min(result["multiply_adds"].values()) > 0, method


def test_dual_shift_removes_8_of_15_types_from_training_only(data: Path) -> None:
    benchmark = load_benchmark("imagenet-r-dual-shift", [f"data={data}"])
    source = load_source(benchmark)
    assert source.domain_names == TYPES
    removed = {}
    for seed in (0, 1):
        stream = load_stream(benchmark, source, seed)
        whole = load_stream(load_benchmark("imagenet-r-5"), source, seed)
        for task, before in zip(stream.tasks, whole.tasks, strict=True):
            assert task.train.domains is not None
            assert before.train.domains is not None
            assert set(before.train.domains) == set(range(15))
            gone = set(range(15)) - set(task.train.domains.tolist())
            assert len(gone) == 8
            assert gone == set(task.removed_domains)
            kept = [domain not in gone for domain in before.train.domains]
            assert task.train.indices.tolist() == before.train.indices[kept].tolist()
            assert task.test.indices.tolist() == before.test.indices.tolist()
        removed[seed] = [task.removed_domains for task in stream.tasks]
        assert len(set(removed[seed])) > 1, "other types in each task"
        again = load_stream(benchmark, source, seed)
        assert [task.removed_domains for task in again.tasks] == removed[seed]
    assert removed[0] != removed[1]


@pytest.mark.parametrize("name", PRESETS)
def test_dry_run_requires_no_data(name: str, tmp_path: Path) -> None:
    run = coda("bench", name, "--dry-run", "--data", str(tmp_path / "nowhere"))
    runs = json.loads(run.stdout)["runs"]
    assert {each["method"] for each in runs} == set(METHODS)
    trials = 3 if name == "domainnet-5" else 5
    assert len(runs) == trials * len(METHODS)
    assert {each["training"]["seed"] for each in runs} == set(range(trials))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "tasks", "classes", "epochs", "resize", "small"),
    [
        ("cifar-100-10", 10, 100, 20, "squash", 20),
        ("imagenet-r-5", 5, 200, 50, "crop", 20),
        ("imagenet-r-10", 10, 200, 50, "crop", 20),
        ("imagenet-r-20", 20, 200, 50, "crop", 20),
        ("domainnet-5", 5, 345, 20, "crop", 10),
        ("imagenet-r-dual-shift", 5, 200, 50, "crop", 20),
    ],
)
def test_preset_has_the_papers_settings(
    name: str, tasks: int, classes: int, epochs: int, resize: str, small: int
) -> None:
    benchmark = load_benchmark(name)
    assert (benchmark.stream.tasks, benchmark.classes) == (tasks, classes)
    assert benchmark.stream.remove_domains == (8 if name.endswith("shift") else 0)
    assert (benchmark.backbone, benchmark.preprocess) == ("vit-b16-in1k", "paper")
    assert benchmark.resize == resize
    augmentation = benchmark.augmentation
    assert augmentation is not None
    assert augmentation.scale == (0.08, 1.0)
    assert augmentation.ratio == (3 / 4, 4 / 3)
    assert augmentation.flip == 0.5
    for method in PAPER_METHODS:
        training = benchmark.method_training(method, 0)
        assert (training.epochs, training.batch_size) == (epochs, 128)
        assert (training.schedule, training.queries) == ("cosine", "exact")
        rate = training.learning_rate or METHODS[method].type.learning_rate
        whole = method in ("upper-bound", "er-5000", "ft", "ft++", "lwf-mc")
        assert rate == (1e-4 if whole else 1e-3)
    options: Any = {method: benchmark.method_config(method) for method in PAPER_METHODS}
    assert (options["coda-p"].components, options["coda-p"].length) == (100, 8)
    assert (options["coda-p-s"].components, options["coda-p-s"].length) == (small, 4)
    assert options["coda-p"].tasks == tasks
    assert (options["l2p++"].pool, options["deep-l2p++"].pool) == (30, 100)
    assert options["er-5000"].buffer == 5000
    assert options["coda-p"].preset == options["coda-p-s"].preset == "paper"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("protocol", ["release-2022", "release-2023"])
def test_release_protocol_equals_the_released_scripts(name: str, protocol: str) -> None:
    benchmark = load_benchmark(name, [f"protocol={protocol}"])
    paper = load_benchmark(name)
    for method in PAPER_METHODS:
        training, before = (each.method_training(method, 0) for each in (benchmark, paper))
        assert training.schedule == "lagging-cosine"
        whole = method in ("upper-bound", "er-5000", "ft", "ft++", "lwf-mc")
        assert training.learning_rate == (5e-5 if whole and name == "cifar-100-10" else None)
        assert training.epochs == (5 if name == "domainnet-5" else before.epochs)
    assert benchmark.method_config("coda-p").preset == protocol  # type: ignore[attr-defined]
    small: Any = benchmark.method_config("coda-p-s")
    assert small.components == (10 if name == "domainnet-5" else 20)


def test_command_line_overrides_the_protocol() -> None:
    benchmark = load_benchmark(
        "domainnet-5",
        [
            "protocol=release-2022",
            "training.epochs=2",
            "training.schedule=cosine",
            "methods.coda-p.options.preset=paper",
        ],
    )
    training = benchmark.method_training("coda-p", 0)
    assert (training.epochs, training.schedule) == (2, "cosine")
    assert benchmark.method_config("coda-p").preset == "paper"  # type: ignore[attr-defined]
    assert benchmark.method_config("coda-p-s").preset == "release-2022"  # type: ignore[attr-defined]


def test_without_a_protocol_the_package_defaults_apply() -> None:
    benchmark = load_benchmark("pocket")
    assert benchmark.method_training("coda-p", 0).schedule == "cosine"
    assert benchmark.method_config("coda-p").preset == "release-2023"  # type: ignore[attr-defined]


def test_unknown_protocol_or_release_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"protocol.*'paper', 'release-2022' or 'release-2023'"):
        load_benchmark("cifar-100-10", ["protocol=release"])
    (tmp_path / "a.yaml").write_text("extends: cifar-100-10\nvariants: 3\n")
    with pytest.raises(BadOption, match="variants"):
        load_benchmark(str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text("extends: cifar-100-10\nvariants: {release: {trials: 3}}\n")
    with pytest.raises(BadOption, match=r"variants.*'paper', 'release-2022' or 'release-2023'"):
        load_benchmark(str(tmp_path / "a.yaml"))
    variant = "extends: cifar-100-10\nvariants: {release-2023: {trails: 3}}\n"
    (tmp_path / "a.yaml").write_text(variant)
    assert load_benchmark(str(tmp_path / "a.yaml"), ["protocol=release-2022"]).trials == 5
    with pytest.raises(UnknownName, match="Did you mean 'trials'"):
        load_benchmark(str(tmp_path / "a.yaml"), ["protocol=release-2023"])


def test_a_preset_is_merged_into_the_one_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "extends: pocket-dual-shift\nname: a\ntraining: {epochs: 1}\nmethods:\n"
        "  ft++: {training: {batch_size: 8}}\n  ft: !replace {training: {batch_size: 8}}\n"
        "  new: {method: coda-p}\n"
    )
    benchmark, base = load_benchmark(str(tmp_path / "a.yaml")), load_benchmark("pocket-dual-shift")
    assert benchmark.training == {"epochs": 1, "batch_size": 16}
    assert benchmark.stream == base.stream
    assert benchmark.methods["ft++"].training == {"batch_size": 8, "learning_rate": 3e-4}
    assert benchmark.methods["ft"].training == {"batch_size": 8}
    assert list(benchmark.methods) == [*base.methods, "new"]


def test_a_preset_that_extends_itself_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(f"extends: {second}\nname: a\n")
    second.write_text(f"extends: {first}\nname: b\n")
    with pytest.raises(BadOption, match=r"extends itself.*a\.yaml <- .*b\.yaml"):
        load_benchmark(str(first))
    first.write_text("extends: [pocket]\n")
    with pytest.raises(BadOption, match="extends"):
        load_benchmark(str(first))


def test_run_is_independent_of_the_data_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "bench", "cifar-100-10", "--methods", "ncm", "--trials", "1", "--json",
        "--out", str(tmp_path / "runs"), "--set", f"backbone={data / 'tiny.safetensors'}",
    )  # fmt: skip
    assert coda(*arguments, CODA_DATA=str(data)).exit_code == 0
    result = tmp_path / "runs" / "cifar-100-10" / "ncm" / "trial-0" / "result.json"
    before = json.loads(result.read_text())
    result.unlink()
    monkeypatch.chdir(tmp_path)
    write_cifar(Path("123"))  # a name that YAML takes for a number
    assert coda(*arguments, "--data", "123").exit_code == 0
    assert json.loads(result.read_text())["matrix"] == before["matrix"]
    (run,) = runs_of(load_benchmark("cifar-100-10", ["trials=1"]), ["ncm"], tmp_path)
    assert not {"data", "lists", "classes", "protocol"} & run.config.keys()


def test_wrong_number_of_classes_is_rejected(data: Path) -> None:
    benchmark = load_benchmark("cifar-100-10", [f"data={data}", "classes=99"])
    with pytest.raises(MissingData, match=r"has 100 classes, but cifar-100-10 is made for 99\..*"):
        load_source(benchmark)
    part = load_benchmark("imagenet-r-10", [f"data={data}", "source=cifar-100"])
    with pytest.raises(MissingData, match="set classes=100"):
        load_source(part)


def test_unknown_source_suggests_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'cifar-100'"):
        load_source(load_benchmark("cifar-100-10", ["source=cifar100"]))


# --- CIFAR-100 ---


def check_cifar(source: Source) -> None:
    assert source.class_names == tuple(cifar_meta()["fine_label_names"])
    for split, part in ((source.train, cifar_part(3, 0)), (source.test, cifar_part(1, 1))):
        assert split.labels.tolist() == part["fine_labels"]
        assert pixels(split).shape == (len(part["data"]), 32, 32, 3)
        red, green = part["data"][7, 33], part["data"][7, 1024 + 33]
        assert tuple(pixels(split)[7, 1, 1, :2]) == (red, green)
        assert np.array_equal(pixels(split)[:, :, :, 2].reshape(-1, 1024), part["data"][:, 2048:])


def test_cifar_is_read_from_the_archive_the_folder_and_inside_the_folder(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "a")
    assert b"numpy.core.multiarray" in (folder / "train").read_bytes()
    check_cifar(paper_source("cifar-100", tmp_path / "a", None))
    check_cifar(paper_source("cifar-100", folder))
    archive = pack(folder)
    (tmp_path / "b").mkdir()
    archive.rename(tmp_path / "b" / archive.name)
    check_cifar(paper_source("cifar-100", tmp_path / "b"))
    assert [path.name for path in (tmp_path / "b").iterdir()] == [archive.name]


def test_cifar_pickled_by_python_3_is_the_same(tmp_path: Path) -> None:
    write_cifar(tmp_path, lambda values: pickle.dumps(values, protocol=2))
    check_cifar(paper_source("cifar-100", tmp_path))


def test_cifar_is_read_as_image_folders(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("apple", "zebra"):
            write_image(tmp_path / "cifar-100" / part / name / "1.png", 1)
    source = paper_source("cifar-100", tmp_path)
    assert (source.name, source.class_names) == ("cifar-100", ("apple", "zebra"))


class Command:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_malicious_pickle_executes_nothing(protocol: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    commands = [
        Command(os.system, f"touch {trap}"),
        Command(eval, f"open({str(trap)!r}, 'w')"),
        Command(np.load, "train", None, True),
        Command(np.array, [1], object),
        Command(np.frombuffer, b"1", np.uint8),
        Command(importlib.import_module, "antigravity"),
        Command(open, str(trap), "w"),
    ]
    for command in commands:
        for values in (command, {"data": command}, {"fine_label_names": [command]}):
            content = pickle.dumps(values, protocol)
            with pytest.raises(CorruptFile, match="differs from the published file"):
                read_cifar_pickle(content, "train")
    write_cifar(tmp_path, lambda values: pickle.dumps({**values, "x": commands[0]}, protocol))
    with pytest.raises(CorruptFile, match="Download the file again"):
        paper_source("cifar-100", tmp_path)
    assert not trap.exists()


def array_with(shape: bytes, content: bytes = b"U\x01a", dtype: bytes = b"U\x02u1") -> bytes:
    """A pickle of a dict with one array."""
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"K\x00\x85U\x01b\x87R(K\x01" + shape + b"cnumpy\ndtype\n" + dtype + b"K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + content + b"tbu."
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "exhausted"),
        (b"not opcodes", "opcode"),
        (b"\x80\x02}", "exhausted"),
        (b"\x80\x02K\x01.", "it is not a dict"),
        (b"\x80\x02.", "stack"),
        (b"\x80\x02(.", "MARK"),
        (b"\x80\x02e.", "MARK"),
        (b"\x80\x02K\x01(K\x01e.", "no attribute"),
        (b"\x80\x02}K\x01K\x01s.", "key is not a string"),
        (b"\x80\x02}(U\x01au.", "odd number"),
        (b"\x80\x02h\x05.", "5"),
        (b"\x80\x02T\xff\xff\xff\x7fabc.", "expected 2147483647 bytes"),
        (b"\x80\x02cnumpy\nload\n.", "numpy load"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.", "other than a uint8 array"),
        (b"\x80\x02c_codecs\nencode\nU\x01aU\x03hex\x86R.", "other than a uint8 array"),
        (b"\x80\x02cnumpy\ndtype\n)\x81.", "it is not a dict"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "SHORT_BINUNICODE is not allowed"),
        (array_with(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"), "2147483647"),
        (array_with(b"K\x02\x85"), "shape .2,. with 1 values"),
        (array_with(b"J\xff\xff\xff\xff\x85"), "shape .-1,."),
        (array_with(b"K\x01\x85", dtype=b"U\x02O8"), "other than a uint8 array"),
        (array_with(b"K\x01\x85", content=b"]"), "not a row-major uint8 array"),
        # A key whose hash overflows the stack, a memo and an array that fill the memory.
        (b"\x80\x02})" + 200_000 * b"\x85" + b"Ns.", "1,000 tuples"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "more than 2,000,000 values"),
        (
            b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
            b"J\xff\xff\xff\x7f\x85U\x01O\x87R.",
            "other than a uint8 array",
        ),
    ],
)
def test_damaged_cifar_pickle_is_rejected(content: bytes, problem: str) -> None:
    with pytest.raises(CorruptFile, match=f"train: .*{problem}.*Download the file again"):
        read_cifar_pickle(content, "train")


def test_deeply_nested_label_is_rejected(tmp_path: Path) -> None:
    part, depth = cifar_part(1, 0), 100_000
    content = python2_pickle({**part, "data": part["data"][:1]})
    labels = b"U\x0bfine_labels" + depth * b"]" + (depth - 1) * b"a" + b"s."
    (write_cifar(tmp_path) / "train").write_bytes(content[:-1] + labels)
    with pytest.raises(CorruptFile, match=r"train: .*label \[+\.\.\.\]+ is not in 0 to 99"):
        paper_source("cifar-100", tmp_path)


def test_array_in_opcodes_is_read() -> None:
    assert read_cifar_pickle(array_with(b"K\x01\x85"), "train")["data"].tolist() == [97]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_truncated_cifar_pickle_is_rejected(share: float) -> None:
    content = python2_pickle(cifar_part(1, 0))
    with pytest.raises(CorruptFile, match="train"):
        read_cifar_pickle(content[: int(share * len(content))], "train")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), st.binary(max_size=4)), max_size=6)
)
def test_random_damage_gives_a_dict_or_a_readable_error(
    damages: list[tuple[int, int, bytes]],
) -> None:
    content = python2_pickle({"fine_labels": [1, 2], "data": np.zeros((2, 3), np.uint8)})
    for place, lost, instead in damages:
        content = content[:place] + instead + content[place + lost :]
    try:
        values = read_cifar_pickle(content, "train")
    except CorruptFile:
        return
    assert isinstance(values, dict)


def test_small_pickle_cannot_expand(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"T" + struct.pack("<i", 50_000) + b"x" * 50_000 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00U\x06latin1\x86R"
    with pytest.raises(CorruptFile, match="more bytes than it has"):
        read_cifar_pickle(b"\x80\x02(" + text + 3 * again + b"t.", "train")
    monkeypatch.setattr(cifar_pickle, "MAX_OPCODES", 1000)
    with pytest.raises(CorruptFile, match="more than 1,000 values"):
        read_cifar_pickle(b"\x80\x02(" + 1000 * b"]" + b"t.", "train")


@pytest.mark.parametrize(
    ("part", "field", "value", "problem"),
    [
        ("train", "fine_labels", [0, 1], "no list 'fine_labels' for its 100 images"),
        ("train", "fine_labels", [100] * 100, "label 100 is not in 0 to 99"),
        ("test", "fine_labels", [-1] * 100, "label -1 is not in 0 to 99"),
        ("test", "fine_labels", ["0"] * 100, "label '0' is not in 0 to 99"),
        ("test", "data", None, "no array 'data' with 3072 values"),
        ("test", "data", np.zeros((100, 3071), np.uint8), "no array 'data' with 3072 values"),
        ("meta", "fine_label_names", [1, 2], "no list 'fine_label_names'"),
    ],
)
def test_inconsistent_cifar_files_are_rejected(
    part: str, field: str, value: Any, problem: str, tmp_path: Path
) -> None:
    values = cifar_meta() if part == "meta" else cifar_part(1, 0)
    write_cifar(tmp_path, **{part: {**values, field: value}})
    with pytest.raises(CorruptFile, match=f"{part}: .*{problem}"):
        paper_source("cifar-100", tmp_path)


def test_partially_extracted_cifar_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_cifar(tmp_path)
    archive = pack(folder)
    (folder / "test").unlink()
    with pytest.raises(
        MissingData, match=r"test: .*not extracted completely\. Extract .*tar\.gz again"
    ):
        paper_source("cifar-100", tmp_path)
    monkeypatch.setattr("coda_prompt.research.streams.paper.cifar.MAX_BYTES", 1000)
    with pytest.raises(CorruptFile, match="more than any file of CIFAR-100"):
        paper_source("cifar-100", tmp_path)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with pytest.raises(CorruptFile, match="more than any file of CIFAR-100"):
        paper_source("cifar-100", tmp_path)
    monkeypatch.undo()
    content = archive.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1000):
        archive.write_bytes(content[:size])
        with pytest.raises(CorruptFile, match=r"tar\.gz: it cannot be unpacked"):
            paper_source("cifar-100", tmp_path)


def test_archive_of_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    pack(tmp_path / "other").rename(tmp_path / "cifar-100-python.tar.gz")
    with pytest.raises(CorruptFile, match="cifar-100-python/meta"):
        paper_source("cifar-100", tmp_path)
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        link = tarfile.TarInfo("cifar-100-python/meta")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(CorruptFile, match="meta in it is not a file"):
        paper_source("cifar-100", tmp_path)


# --- benchmarks of pre-trained models ---


def write_images(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 8)).save(root / name)


def write_cub(folder: Path) -> None:
    """Two classes of two images in the layout of the archive; one of each is for training."""
    names = ["001.Albatross/a_2.jpg", "001.Albatross/a_1.jpg", "002.Auk/b_1.jpg", "002.Auk/b_2.jpg"]
    write_images(folder / "images", names)
    lists = {
        "images.txt": names,
        "image_class_labels.txt": ["1", "1", "2", "2"],
        "train_test_split.txt": ["0", "1", "1", "0"],
        "classes.txt": ["001.Albatross", "002.Auk"],
    }
    for file, values in lists.items():
        lines = [f"{number} {value}\n" for number, value in enumerate(values, 1)]
        (folder / file).write_text("".join(lines))


def test_cub_has_its_official_split(tmp_path: Path) -> None:
    write_cub(tmp_path / "CUB_200_2011")
    source = paper_source("cub-200", tmp_path)
    assert source.class_names == ("001.Albatross", "002.Auk")
    assert [os.path.basename(path) for path in paths(source.train)] == ["a_1.jpg", "b_1.jpg"]
    assert [os.path.basename(path) for path in paths(source.test)] == ["a_2.jpg", "b_2.jpg"]
    assert (source.train.labels.tolist(), source.test.labels.tolist()) == ([0, 1], [0, 1])
    assert source.train.image(0).size == (9, 8)


def test_incomplete_lists_of_cub_are_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "CUB_200_2011"
    write_cub(folder)
    (folder / "image_class_labels.txt").write_text("1 1\n2 1\n3 9\n4 2\n")
    with pytest.raises(CorruptFile, match=r"class 9 is not in classes\.txt"):
        paper_source("cub-200", tmp_path)
    (folder / "image_class_labels.txt").write_text("1 1\n2 1\n3 2\n")
    with pytest.raises(CorruptFile, match="do not list the same images"):
        paper_source("cub-200", tmp_path)
    (folder / "image_class_labels.txt").write_text("1 1\n2\n")
    with pytest.raises(CorruptFile, match="line 2 is not a number and a value"):
        paper_source("cub-200", tmp_path)
    (folder / "image_class_labels.txt").unlink()
    with pytest.raises(MissingData, match=r"image_class_labels\.txt: there is no such file"):
        paper_source("cub-200", tmp_path)


@pytest.mark.parametrize(
    ("name", "folder"),
    [("cub-200", "cub"), *((name, name) for name in ("imagenet-a", "objectnet", "vtab"))],
)
def test_subsets_are_read_from_train_and_test_folders(
    name: str, folder: str, tmp_path: Path
) -> None:
    with pytest.raises(MissingData, match=rf"LAMDA-PILOT.*{folder}/"):
        paper_source(name, tmp_path)
    files = [f"{part}/{each}/1.jpg" for part in ("train", "test") for each in ("b", "a")]
    write_images(tmp_path / folder, files)
    source = paper_source(name, tmp_path)
    assert (source.name, source.class_names, source.notes) == (name, ("a", "b"), ())
    write_images(tmp_path / "other" / folder, ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg"])
    unsplit = paper_source(name, tmp_path / "other")
    assert "the split is not the published one" in unsplit.notes[-1]


@pytest.mark.parametrize(
    ("name", "tasks", "classes"),
    [
        ("cifar-100-b0-inc5", 20, 100),
        ("cifar-100-b0-inc10", 10, 100),
        ("imagenet-r-b0-inc5", 40, 200),
        ("imagenet-r-b0-inc20", 10, 200),
        ("cub-200-b0-inc10", 20, 200),
        ("imagenet-a-b0-inc20", 10, 200),
        ("objectnet-b0-inc10", 20, 200),
        ("omnibenchmark-b0-inc30", 10, 300),
        ("vtab-b0-inc10", 5, 50),
    ],
)
def test_b0_inc_presets_follow_the_protocol(name: str, tasks: int, classes: int) -> None:
    preset = load_benchmark(name)
    assert (preset.stream.tasks, preset.classes) == (tasks, classes)
    assert classes / tasks == float(name.rpartition("inc")[2])
    shuffled = name != "vtab-b0-inc10"
    assert preset.stream.order_seed == (1993 if shuffled else None)
    assert (preset.trials, preset.first_seed) == (1, 1993 if shuffled else 0)
    assert set(METHODS) <= set(preset.methods)


# --- ImageNet-R ---


def test_imagenet_r_split_equals_its_lists(data: Path) -> None:
    source = paper_source("imagenet-r", data)
    for split, images in zip((source.train, source.test), imagenet_r_files(), strict=True):
        assert paths(split) == [file for file, _ in images]
        assert split.labels.tolist() == [label for _, label in images]
        assert split.domains is not None
        found = [source.domain_names[domain] for domain in split.domains]
        assert found == [file.split("/")[1].rpartition("_")[0] for file, _ in images]
        assert split.image(0).size == (9, 8)
    assert source.class_names != tuple(sorted(WNIDS))
    assert [source.class_names[label] for label in LABELS] == WNIDS
    assert source.notes == ()
    stream = load_stream(load_benchmark("imagenet-r-10"), source, seed=0)
    assert stream.class_names[:2] == (WNIDS[LABELS.index(0)], WNIDS[LABELS.index(1)])


def test_imagenet_r_lists_may_be_in_another_folder(data: Path, tmp_path: Path) -> None:
    write_imagenet_r(tmp_path / "data", lists=False)
    plain = load_source(load_benchmark("imagenet-r-10", [f"data={tmp_path / 'data'}"]))
    assert any("split and class order are not the paper's" in note for note in plain.notes)
    pointed = [f"data={tmp_path / 'data'}", f"lists={data}"]
    source = load_source(load_benchmark("imagenet-r-10", pointed))
    assert source.fingerprint() == paper_source("imagenet-r", data).fingerprint()
    assert source.fingerprint() != plain.fingerprint()
    assert paper_source("imagenet-r", data / "imagenet-r").class_names == source.class_names
    with pytest.raises(MissingData, match="Download both lists"):
        paper_source("imagenet-r", tmp_path / "data", tmp_path)
    with pytest.raises(MissingData, match="Point at the lists of imagenet-r"):
        paper_source("imagenet-r", tmp_path / "data", tmp_path / "none")
    with pytest.raises(BadOption, match="lists"):
        paper_source("cifar-100", data, tmp_path)


def test_imagenet_r_without_lists_is_split_by_seed_with_a_note(tmp_path: Path) -> None:
    for wnid in WNIDS[:3]:
        for number in range(10):
            write_image(tmp_path / "imagenet-r" / wnid / f"{TYPES[number]}_{number}.jpg", number)
    source = paper_source("imagenet-r", tmp_path)
    assert (source.name, source.class_names) == ("imagenet-r", tuple(WNIDS[:3]))
    assert np.bincount(source.train.labels).tolist() == [8] * 3
    assert np.bincount(source.test.labels).tolist() == [2] * 3
    assert source.domain_names == TYPES[:10]
    assert paths(source.train) == paths(paper_source("imagenet-r", tmp_path).train)
    assert "split and class order are not the paper's" in source.notes[-1]


def test_imagenet_r_train_and_test_folders_are_used_as_splits(tmp_path: Path) -> None:
    for part, kinds in (("train", ("art", "toy")), ("test", ("video_game",))):
        for wnid in WNIDS[:2]:
            for kind in kinds:
                write_image(tmp_path / "imagenet-r" / part / wnid / f"{kind}_1.jpg", 1)
    source = paper_source("imagenet-r", tmp_path)
    assert (len(source.train), len(source.test)) == (4, 2)
    assert source.domain_names == ("art", "toy", "video_game")
    assert source.notes[-1].startswith("class order is not the paper's")


def test_image_without_a_type_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "imagenet-r" / WNIDS[0] / "art12.jpg", 1)
    with pytest.raises(MissingData, match=r"art12\.jpg: .*names like art_12\.jpg"):
        paper_source("imagenet-r", tmp_path)


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ([("a/art_1.jpg", 0), ("b/art_1.jpg", 2)], "label 2 of 'b/art_1.jpg' is out of range"),
        ([("a/art_1.jpg", -1), ("b/art_1.jpg", 0)], "label -1 of 'a/art_1.jpg' is out of range"),
        ([("a/art_1.jpg", 0), ("b/art_1.jpg", 0)], "elsewhere 'b' has label 0 and label 0 is 'a'"),
        ([("a/art_1.jpg", 0), ("a/art_2.jpg", 1)], "elsewhere 'a' has label 0 and label 1 is 'a'"),
        ([("a/art_1.jpg", "0")], "not a path and a number"),
        ([("a/art_1.jpg", True)], "not a path and a number"),
        ([("../art_1.jpg", 0)], "is not a path like folder/file.jpg"),
        ([("a/art_1.jpg", 0), ("a/art_1.jpg", 0)], "already in imagenet-r_train.yaml"),
        ([("a/toy_1.jpg", 0), ("b/art_1.jpg", 1)], "already in imagenet-r_train.yaml"),
    ],
)
def test_inconsistent_list_is_rejected(images: list[Any], problem: str, tmp_path: Path) -> None:
    for file in ("a/art_1.jpg", "a/art_2.jpg", "a/toy_1.jpg", "b/art_1.jpg"):
        write_image(tmp_path / "imagenet-r" / file, 1)
    write_list(tmp_path / "imagenet-r_train.yaml", images)
    write_list(tmp_path / "imagenet-r_test.yaml", [("a/toy_1.jpg", 0)])
    with pytest.raises(CorruptFile, match=problem):
        paper_source("imagenet-r", tmp_path)


@pytest.mark.parametrize(
    "text", ["data: [a", "3", "data: [a/art_1.jpg]\ntargets: []", "\0", "a: 2020-99-99", "[" * 5000]
)
def test_malformed_list_is_rejected(text: str, tmp_path: Path) -> None:
    write_image(tmp_path / "imagenet-r" / "a" / "art_1.jpg", 1)
    (tmp_path / "imagenet-r_train.yaml").write_text(text)
    with pytest.raises(
        MissingData, match=r"imagenet-r_test\.yaml: there is no such file, but .*Download both"
    ):
        paper_source("imagenet-r", tmp_path)
    write_list(tmp_path / "imagenet-r_test.yaml", [("a/art_1.jpg", 0)])
    with pytest.raises(CorruptFile, match=r"imagenet-r_train\.yaml"):
        paper_source("imagenet-r", tmp_path)


def test_list_with_a_missing_file_is_rejected(tmp_path: Path) -> None:
    write_image(tmp_path / "imagenet-r" / "a" / "art_1.jpg", 1)
    absent = [("a/art_2.jpg", 0), ("b/art_1.jpg", 1)]
    write_list(tmp_path / "imagenet-r_train.yaml", [("a/art_1.jpg", 0), *absent])
    write_list(tmp_path / "imagenet-r_test.yaml", [])
    with pytest.raises(
        MissingData, match=r"a/art_2\.jpg: .*_train\.yaml lists this .*2 of 3 .*Extract"
    ):
        paper_source("imagenet-r", tmp_path)


# --- DomainNet ---


def test_domainnet_split_equals_its_lists(data: Path) -> None:
    source = paper_source("domainnet", data)
    assert source.domain_names == DOMAINS
    assert source.class_names == tuple(f"thing {label:03d}" for label in range(345))
    assert (len(source.train), len(source.test)) == (690, 345)
    for split in (source.train, source.test):
        assert split.domains is not None
        for file, label, domain in zip(paths(split), split.labels, split.domains, strict=True):
            name = DOMAINS[domain]
            assert file.startswith(f"thing {label:03d}/{name}_{label:03d}_")
    assert np.all(np.diff(source.train.domains) >= 0), "domain after domain, as listed"


def test_domainnet_lists_may_be_in_another_folder(tmp_path: Path) -> None:
    write_domainnet(tmp_path, classes=12)
    whole = paper_source("domainnet", tmp_path)
    (tmp_path / "lists").mkdir()
    for path in (tmp_path / "domainnet").glob("*.txt"):
        path.rename(tmp_path / "lists" / path.name)
    again = paper_source("domainnet", tmp_path, tmp_path / "lists")
    assert again.fingerprint() == whole.fingerprint()


def test_domainnet_domains_can_be_removed_per_task(data: Path) -> None:
    benchmark = load_benchmark("domainnet-5", ["stream.remove_domains=3"])
    stream = load_stream(benchmark, paper_source("domainnet", data), seed=1)
    for task in stream.tasks:
        assert task.train.domains is not None
        assert len(set(task.train.domains.tolist())) == 3
        assert task.test.domains is not None
        assert len(set(task.test.domains.tolist())) == 6


@pytest.mark.parametrize(
    ("line", "error", "problem"),
    [
        ("real/thing 000/none.jpg 0", MissingData, r"real_test\.txt lists this file"),
        ("real/thing 000/real_000_000004.jpg 99", CorruptFile, "label 99 of .* out of range"),
        ("real/thing 000/real_000_000004.jpg -1", CorruptFile, "label -1 of .* out of range"),
        ("real/thing 000/real_000_000004.jpg", CorruptFile, "is not a line like real/class/"),
        (f"real/a/b.jpg {'9' * 5000}", CorruptFile, "is not a line like real/class/file.jpg 0"),
        ("sketch/thing 000/b.jpg 0", CorruptFile, "is not a line like real/class/file.jpg 0"),
        ("real/../thing/a.jpg 0", CorruptFile, "is not a path like folder/folder/file.jpg"),
        ("real/b.jpg 0", CorruptFile, "is not a path like folder/folder/file.jpg"),
    ],
)
def test_malformed_domainnet_line_is_rejected(
    line: str, error: Any, problem: str, tmp_path: Path
) -> None:
    write_domainnet(tmp_path, classes=12)
    with (tmp_path / "domainnet" / "real_test.txt").open("a") as file:
        file.write(f"{line}\n\n")
    with pytest.raises(error, match=problem):
        paper_source("domainnet", tmp_path)


def test_partially_extracted_domainnet_is_rejected(tmp_path: Path) -> None:
    write_domainnet(tmp_path, classes=12)
    folder = tmp_path / "domainnet"
    assert len(paper_source("domainnet", tmp_path).class_names) == 12
    with pytest.raises(MissingData, match="domainnet-5 is made for 345"):
        load_source(load_benchmark("domainnet-5", [f"data={tmp_path}"]))
    (folder / "sketch_test.txt").rename(folder / "kept.txt")
    with pytest.raises(
        MissingData, match=r"sketch_test\.txt: there is no such list\. Download the"
    ):
        paper_source("domainnet", tmp_path)
    (folder / "sketch_test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFile, match="is not a text file"):
        paper_source("domainnet", tmp_path)
    (folder / "kept.txt").rename(folder / "sketch_test.txt")
    (folder / "sketch").rename(folder / "sketch.part")
    with pytest.raises(
        MissingData, match=r"domains are missing: sketch\. Extract all six archives"
    ):
        paper_source("domainnet", tmp_path)


# --- not there ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar-100", ("cifar-100-python.tar.gz", "161 MB", "https://www.cs.toronto.edu")),
        (
            "imagenet-r",
            ("imagenet-r.tar", "2 GB", "https://github.com/hendrycks", "imagenet-r_train.yaml"),
        ),
        ("domainnet", ("six archives", "17.5 GB", "https://ai.bu.edu/M3SDA")),
    ],
)
def test_missing_dataset_error_says_what_to_download_and_where_to_put_it(
    name: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    assert name in PAPER_DATASETS
    for root in (None, tmp_path, tmp_path / "none"):
        with pytest.raises(MissingData) as error:
            paper_source(name, root)
        message = str(error.value)
        assert all(part in message for part in expected)
        assert "set --data (or CODA_DATA) to that folder" in message
        assert (name if root is None else str(root)) in message


def test_missing_data_is_reported_before_a_backbone_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coda_prompt.research.bench.inputs.load_backbone", None)
    run = coda("bench", "imagenet-r-10", "--data", str(tmp_path), "--out", str(tmp_path / "runs"))
    assert isinstance(run.exception, MissingData)
    assert run.stdout == ""
