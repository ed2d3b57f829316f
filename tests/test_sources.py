"""Arrays and folders as sources of labelled images."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from small import array_source

from coda_prompt.errors import BadImage, BadOption, MissingData
from coda_prompt.images.folders import folder_source
from coda_prompt.images.sources import ArraySplit, FileSplit, Source, Split


def write(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 3), value).save(path, "PNG")
    return path


def fill(folder: Path, count: int) -> None:
    for number in range(count):
        write(folder / f"{number:03d}.png", number)


def names(split: Split, root: Path) -> list[str]:
    assert isinstance(split, FileSplit)
    return [Path(path).relative_to(root).as_posix() for path in split.paths]


# --- arrays ---


def test_array_split_returns_grey_and_rgb_images() -> None:
    grey = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    split: Split = ArraySplit(grey, [1, 0], [5, 6])
    assert len(split) == 2
    assert split.image(1).mode == "L"
    assert np.array_equal(np.asarray(split.image(1)), grey[1])
    assert split.labels.tolist() == [1, 0]
    assert split.labels.dtype == np.int64
    assert split.domains is not None
    assert split.domains.tolist() == [5, 6]
    rgb = np.arange(36, dtype=np.uint8).reshape(1, 3, 4, 3)
    assert ArraySplit(rgb, [0]).image(0).mode == "RGB"
    assert np.array_equal(np.asarray(ArraySplit(rgb, [0]).image(0)), rgb[0])


def test_modifying_an_image_does_not_change_the_data() -> None:
    split = ArraySplit(np.zeros((1, 2, 2), np.uint8), [0])
    split.image(0).putpixel((0, 0), 9)
    assert split.images.max() == 0


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 3, 4), np.float32),
        np.zeros((2, 3), np.uint8),
        np.zeros((2, 3, 4, 4), np.uint8),
        np.zeros((2, 3, 4, 1), np.uint8),
        np.zeros((2, 0, 4), np.uint8),
    ],
)
def test_array_of_wrong_dtype_or_shape_is_rejected(images: np.ndarray) -> None:
    with pytest.raises(BadOption, match="needs uint8 of N x H x W or N x H x W x 3, got"):
        ArraySplit(images, [0, 0])


@pytest.mark.parametrize(
    ("labels", "problem"),
    [([0], "each of 2 images"), ([[0, 0]], "each of 2"), ([0.0, 1.0], "needs integers, got float")],
)
def test_labels_that_do_not_match_the_images_are_rejected(labels: list[int], problem: str) -> None:
    images = np.zeros((2, 3, 4), np.uint8)
    with pytest.raises(BadOption, match=f"labels.*{problem}"):
        ArraySplit(images, labels)
    with pytest.raises(BadOption, match=f"domains.*{problem}"):
        ArraySplit(images, [0, 0], labels)
    with pytest.raises(BadOption, match=f"labels.*{problem}"):
        FileSplit(["a", "b"], labels)


def test_unnamed_classes_and_domains_are_numbered() -> None:
    images = np.zeros((3, 2, 2), np.uint8)
    source = array_source("x", images, [0, 2, 1], images, [3, 0, 0], train_domains=[0, 1, 0])
    assert source.class_names == ("0", "1", "2", "3")
    assert source.domain_names == ("0", "1")
    assert source.test.domains is None
    assert array_source("x", images, [0, 0, 0], images, [0, 0, 0]).domain_names == ()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"class_names": ["a"]}, "train labels.*run from 0 to 1, but class_names has 1 names"),
        ({"class_names": ["a", "a"]}, "class_names.*'a' occurs twice"),
        ({"train_domains": [0, 3], "domain_names": ["x"]}, "train domains.*run from 0 to 3"),
        ({"test_domains": [0, -1], "domain_names": ["x"]}, "test domains.*run from -1 to 0"),
    ],
)
def test_names_that_do_not_match_the_labels_are_rejected(
    options: dict[str, list[str]], problem: str
) -> None:
    images = np.zeros((2, 2, 2), np.uint8)
    with pytest.raises(BadOption, match=problem):
        array_source("x", images, [0, 1], images, [0, 1], **options)


# --- folders ---


def test_train_and_test_folders_are_used_as_splits(tmp_path: Path) -> None:
    write(tmp_path / "train" / "dog" / "1.png", 10)
    write(tmp_path / "train" / "cat" / "b.PNG", 20)
    write(tmp_path / "train" / "cat" / "a.png", 30)
    write(tmp_path / "test" / "cat" / "z.png", 40)
    write(tmp_path / "test" / "dog" / "z.png", 50)
    source = folder_source(tmp_path)
    assert source.name == tmp_path.name
    assert source.class_names == ("cat", "dog")
    assert names(source.train, tmp_path) == [
        "train/cat/a.png",
        "train/cat/b.PNG",
        "train/dog/1.png",
    ]
    assert source.train.labels.tolist() == [0, 0, 1]
    assert source.train.image(0).getpixel((0, 0)) == 30
    assert names(source.test, tmp_path) == ["test/cat/z.png", "test/dog/z.png"]
    assert source.test.labels.tolist() == [0, 1]
    assert source.notes == ()


def test_other_folders_next_to_train_and_test_are_ignored_and_noted(tmp_path: Path) -> None:
    for part in ("train", "test", "val"):
        write(tmp_path / part / "cat" / "a.png")
    assert folder_source(tmp_path).notes == ("val/ ignored next to train/ and test/",)


def test_class_folders_are_split_80_to_20_with_a_note(tmp_path: Path) -> None:
    sizes = {"a": 50, "b": 10, "c": 5, "d": 4, "e": 2, "f": 1}
    for name, size in sizes.items():
        fill(tmp_path / name, size)
    source = folder_source(tmp_path, seed=3)
    assert source.class_names == tuple("abcdef")
    assert np.bincount(source.train.labels).tolist() == [40, 8, 4, 3, 2, 1]
    assert np.bincount(source.test.labels, minlength=6).tolist() == [10, 2, 1, 1, 0, 0]
    both = names(source.train, tmp_path) + names(source.test, tmp_path)
    assert len(both) == len(set(both)) == sum(sizes.values())
    assert "80/20" in source.notes[0]
    assert "seed 3" in source.notes[0]
    assert source.notes[1] == "2 classes too small to have a test image"


def test_split_depends_on_the_seed_and_not_on_the_path(tmp_path: Path) -> None:
    for place in ("here", "there"):
        for name in ("a", "b"):
            fill(tmp_path / place / name, 40)

    def held_out(place: str, seed: int) -> list[str]:
        return names(folder_source(tmp_path / place, seed=seed).test, tmp_path / place)

    assert held_out("here", 1) == held_out("here", 1) == held_out("there", 1)
    assert held_out("here", 1) != held_out("here", 2)
    of_a = {Path(name).name for name in held_out("here", 1) if name.startswith("a/")}
    of_b = {Path(name).name for name in held_out("here", 1) if name.startswith("b/")}
    assert of_a != of_b


def test_new_file_or_class_hardly_changes_the_split(tmp_path: Path) -> None:
    for name in ("a", "b"):
        fill(tmp_path / name, 50)
    before = set(names(folder_source(tmp_path).test, tmp_path))
    fill(tmp_path / "aa", 10)
    write(tmp_path / "a" / "new.png")
    after = {n for n in names(folder_source(tmp_path).test, tmp_path) if not n.startswith("aa")}
    assert len(before ^ after) <= 2


@pytest.mark.posix
def test_nested_images_are_included_and_other_files_ignored(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "deep" / "er" / "1.png")
    write(tmp_path / "cat" / "2.jpeg")
    write(tmp_path / "cat" / ".3.png")
    write(tmp_path / "cat" / ".cache" / "4.png")
    write(tmp_path / ".git" / "5.png")
    write(tmp_path / "__MACOSX" / "6.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "Thumbs.db").write_text("no image")
    (tmp_path / "README.md").write_text("no image")
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    source = folder_source(tmp_path)
    assert source.class_names == ("cat",)
    both = names(source.train, tmp_path) + names(source.test, tmp_path)
    assert sorted(both) == ["cat/2.jpeg", "cat/deep/er/1.png"]


def test_class_names_may_contain_unicode_and_spaces(tmp_path: Path) -> None:
    for name in ("chat noir", "猫", "Žába", "'; drop"):
        write(tmp_path / name / "Bild (1) Größe.png", 7)
    source = folder_source(tmp_path)
    assert source.class_names == ("'; drop", "chat noir", "Žába", "猫")
    assert [source.train.image(index).getpixel((0, 0)) for index in range(4)] == [7] * 4


def test_images_outside_class_folders_are_ignored_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png")
    write(tmp_path / "stray.png")
    assert "1 images outside class folders ignored" in folder_source(tmp_path).notes


def test_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        write(tmp_path / name / "1.png")
    assert folder_source(tmp_path).class_names == ("bus", "train")


@pytest.mark.posix
def test_links_are_followed_without_cycles(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write(data / "cat" / "1.png")
    write(data / "dog" / "2.png")
    write(tmp_path / "elsewhere" / "3.png")
    (data / "cat" / "more").symlink_to(tmp_path / "elsewhere")
    (data / "cat" / "more again").symlink_to(tmp_path / "elsewhere")
    (data / "cat" / "up").symlink_to(data)  # the dogs are no cats
    (data / "cat" / "top").symlink_to("/")
    (data / "cat" / "self").symlink_to(data / "cat")
    (data / "cat" / "knot").symlink_to(data / "cat" / "knot")
    (data / "all").symlink_to(data)
    (data / "knot").symlink_to(data / "knot")
    source = folder_source(data)
    assert source.class_names == ("cat", "dog")
    both = names(source.train, data) + names(source.test, data)
    assert sorted(both) == ["cat/1.png", "cat/more/3.png", "dog/2.png"]


@pytest.mark.posix
def test_dangling_link_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png")
    (tmp_path / "cat" / "2.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(MissingData, match=r"2\.png: the target of this link does not exist\. "):
        folder_source(tmp_path)


def test_missing_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"none: there is no such folder\. Point at a folder"):
        folder_source(tmp_path / "none")
    with pytest.raises(MissingData, match=r"a\.png: this is not a folder\. Point at"):
        folder_source(write(tmp_path / "a.png"))


def test_empty_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"there is no class folder in it\. Point at a folder"):
        folder_source(tmp_path)
    write(tmp_path / "a.png")
    with pytest.raises(
        MissingData, match=r"there is no class folder in it \(1 images are directly in it\)\. Point"
    ):
        folder_source(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
    with pytest.raises(MissingData, match=r"train: there is no class folder in it\. Point at"):
        folder_source(tmp_path)


def test_empty_class_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    write(tmp_path / "whole" / "cat" / "1.png")
    (tmp_path / "whole" / "dog").mkdir()
    with pytest.raises(MissingData, match=r"class 'dog' has no image\. Put images in it"):
        folder_source(tmp_path / "whole")
    for part in ("train", "test"):
        write(tmp_path / "split" / part / "cat" / "1.png")
        (tmp_path / "split" / part / "dog").mkdir()
    write(tmp_path / "split" / "train" / "dog" / "1.png")
    with pytest.raises(MissingData, match="test/dog: class 'dog' has no image"):
        folder_source(tmp_path / "split")


def test_unreadable_folder_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "cat" / "1.png")
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if Path(path).name == "cat":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        MissingData, match=r"cat: the folder cannot be read \(Permission denied\)\. Check its perm"
    ):
        folder_source(tmp_path)


def test_train_and_test_must_have_the_same_classes(tmp_path: Path) -> None:
    for name in ("train/cat", "train/dog", "test/cat", "test/emu"):
        write(tmp_path / name / "1.png")
    with pytest.raises(
        MissingData, match=r"different classes \(only in train/: dog; only in test/: emu\)\. Create"
    ):
        folder_source(tmp_path)


def test_train_without_test_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "train" / "cat" / "1.png")
    write(tmp_path / "val" / "cat" / "1.png")
    with pytest.raises(MissingData, match=r"it has train/, val/ but not both train/ and test/\. N"):
        folder_source(tmp_path)


def test_folder_name_that_is_not_unicode_is_an_error(tmp_path: Path) -> None:
    try:
        os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    except OSError:
        pytest.skip("this file system only has Unicode names")
    with pytest.raises(MissingData, match=r"caf\\xe9.* is not Unicode.* Rename"):
        folder_source(tmp_path)


def test_unreadable_file_is_named_when_it_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png")
    write(tmp_path / "cat" / "2.png")
    (tmp_path / "cat" / "2.png").write_bytes(b"")
    source = folder_source(tmp_path)
    assert len(source.train) == 2
    with pytest.raises(BadImage, match=r"cat/2\.png: the file is empty"):
        source.train.image(1)


def test_source_can_be_pickled(tmp_path: Path) -> None:
    fill(tmp_path / "cat", 5)
    arrays = array_source(
        "x", np.full((2, 2, 2), 8, np.uint8), [0, 0], np.zeros((1, 2, 2), "u1"), [0]
    )
    for source in (folder_source(tmp_path), arrays):
        source.train.image(0)  # an image read before leaves nothing open behind
        copy: Source = pickle.loads(pickle.dumps(source))
        assert copy.class_names == source.class_names
        for index in range(len(source.train)):
            assert copy.train.image(index).tobytes() == source.train.image(index).tobytes()


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_every_image_is_in_one_split_and_every_class_has_training_images(
    sizes: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("folders")
    for number, size in enumerate(sizes):
        (root / f"class {number}").mkdir()
        for index in range(size):
            (root / f"class {number}" / f"{index}.png").touch()
    source = folder_source(root, seed=seed)
    both = names(source.train, root) + names(source.test, root)
    assert len(both) == len(set(both)) == sum(sizes)
    assert set(source.train.labels.tolist()) == set(range(len(sizes)))
    for number, size in enumerate(sizes):
        assert abs(np.sum(source.test.labels == number) - 0.2 * size) <= 0.5
