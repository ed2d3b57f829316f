"""Streams: a source split into tasks."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small import array_source
from torch.utils.data import DataLoader, Dataset

from coda_prompt.errors import BadOption, ClassInTwoTasks, EmptyTask, UnknownName
from coda_prompt.images.preprocessing import Preprocessing
from coda_prompt.images.sources import ArraySplit, Source
from coda_prompt.research.streams.groups import class_order
from coda_prompt.research.streams.stream import Samples, Stream, make_stream
from coda_prompt.research.training.augmentation import (
    Augmentation,
    training_view,
    view_generator,
)

GOLDEN = Path(__file__).parent / "golden" / "released.json"


def numbered(count: int, first: int = 0) -> np.ndarray:
    """Images whose only pixel is their number."""
    return np.arange(first, first + count, dtype=np.uint8).reshape(count, 1, 1)


def make_source(
    classes: int = 6, per_class: int = 4, domains: int = 0, names: tuple[str, ...] | None = None
) -> Source:
    """Image i of the training data has class i % classes; test images start at 200."""
    count = classes * per_class
    labels = np.arange(count) % classes
    domain_ids = np.arange(count) // classes % domains if domains else None
    test_domain_ids = np.arange(classes) % domains if domains else None
    return array_source(
        "toy",
        numbered(count),
        labels,
        numbered(classes, 200),
        np.arange(classes),
        class_names=names or [f"c{number}" for number in range(classes)],
        train_domains=domain_ids,
        test_domains=test_domain_ids,
        notes=["a toy"],
    )


def pixel_values(samples: Samples) -> list[int]:
    return [int(np.asarray(samples.image(i)).item()) for i in range(len(samples))]


class Unreadable(ArraySplit):
    def image(self, index: int, min_side: int | None = None) -> Image.Image:
        raise AssertionError("an image was read")


# --- class order ---


def test_class_orders_equal_the_released_code() -> None:
    released = json.loads(GOLDEN.read_text())["class_order"]
    assert sorted(released) == ["0", "1", "2", "3", "4"]
    for seed, order in released.items():
        assert list(class_order(100, int(seed))) == order
    stream = make_stream(make_source(100, 1), tasks=10, seed=3)
    assert list(stream.class_order) == released["3"]


def test_seed_0_gives_the_natural_order() -> None:
    assert class_order(5, 0) == (0, 1, 2, 3, 4)


def test_order_seed_gives_the_order_of_the_b0_inc_protocols() -> None:
    # The order of iCaRL and its successors for 100 classes.
    published = [68, 56, 78, 8, 23, 84, 90, 65, 74, 76, 40, 89, 3, 92, 55, 9, 26, 80, 43, 38]
    for seed in (0, 1993):
        stream = make_stream(make_source(100, 1), tasks=10, order_seed=1993, seed=seed)
        assert list(stream.class_order[:20]) == published
    with pytest.raises(BadOption, match="leave out order_seed"):
        make_stream(make_source(2, 1), class_lists=[["c0"], ["c1"]], order_seed=1)


# --- cutting ---


def test_tasks_are_equally_large_and_the_first_get_the_remainder() -> None:
    stream = make_stream(make_source(11), tasks=4)
    assert [task.classes for task in stream.tasks] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10)]
    assert [task.index for task in stream.tasks] == [0, 1, 2, 3]


def test_last_task_gets_the_remaining_classes() -> None:
    stream = make_stream(make_source(8), classes_per_task=3)
    assert [len(task.classes) for task in stream.tasks] == [3, 3, 2]
    assert [
        len(task.classes) for task in make_stream(make_source(8), classes_per_task=50).tasks
    ] == [8]


def test_labels_are_rows_that_map_back_to_the_sources_classes() -> None:
    source = make_source(6)
    stream = make_stream(source, tasks=3, seed=1)
    assert stream.class_order != tuple(range(6))
    assert stream.class_names == tuple(f"c{number}" for number in stream.class_order)
    for task in stream.tasks:
        for samples in (task.train, task.test):
            assert set(samples.labels.tolist()) == set(task.classes)
            for position, row in enumerate(samples.labels.tolist()):
                original = samples.split.labels[samples.indices[position]]
                assert stream.class_order[row] == original
        assert all(value >= 200 for value in pixel_values(task.test))
        assert all(
            value % 6 == stream.class_order[row]
            for value, row in zip(pixel_values(task.train), task.train.labels.tolist(), strict=True)
        )


def test_class_lists_are_used_unchanged_for_every_seed() -> None:
    lists = [["c5", "c0"], ["c3"]]
    for seed in (0, 4):
        stream = make_stream(make_source(6, 4), class_lists=lists, seed=seed)
        assert stream.class_order == (5, 0, 3)
        assert stream.class_names == ("c5", "c0", "c3")
        assert [task.classes for task in stream.tasks] == [(0, 1), (2,)]
        assert pixel_values(stream.tasks[0].train) == [0, 5, 6, 11, 12, 17, 18, 23]
        assert stream.tasks[0].train.labels.tolist() == [1, 0] * 4
        assert pixel_values(stream.tasks[1].test) == [203]


def test_stream_has_the_name_and_notes_of_its_source() -> None:
    stream = make_stream(make_source(), tasks=2)
    assert stream.name == "toy"
    assert stream.notes == ("a toy",)
    assert not stream.validation


@given(
    classes=st.integers(1, 30),
    seed=st.integers(0, 50),
    data=st.data(),
)
def test_every_class_is_in_one_task_and_every_image_is_used_once(
    classes: int, seed: int, data: st.DataObject
) -> None:
    tasks = data.draw(st.integers(1, classes))
    source = make_source(classes, 2)
    stream = make_stream(source, tasks=tasks, seed=seed)
    sizes = [len(task.classes) for task in stream.tasks]
    assert len(sizes) == tasks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [row for task in stream.tasks for row in task.classes] == list(range(classes))
    assert sorted(stream.class_order) == list(range(classes))
    for part, count in (("train", 2 * classes), ("test", classes)):
        used = np.concatenate([getattr(task, part).indices for task in stream.tasks])
        assert sorted(used.tolist()) == list(range(count))


@given(classes=st.integers(1, 30), size=st.integers(1, 35))
def test_only_the_last_task_may_be_smaller(classes: int, size: int) -> None:
    sizes = [
        len(task.classes) for task in make_stream(make_source(classes), classes_per_task=size).tasks
    ]
    assert sum(sizes) == classes
    assert all(count == size for count in sizes[:-1])
    assert 1 <= sizes[-1] <= size


# --- validation ---


def test_validation_uses_a_fifth_of_the_training_images_and_no_test_image() -> None:
    source = make_source(5, 20)
    test = Unreadable(np.zeros((5, 1, 1), np.uint8), np.arange(5))
    stream = make_stream(replace(source, test=test), tasks=2, seed=1, validation=True)
    trained = [value for task in stream.tasks for value in pixel_values(task.train)]
    held_out = [value for task in stream.tasks for value in pixel_values(task.test)]
    assert len(trained) == 80
    assert len(held_out) == 20
    assert sorted(trained + held_out) == list(range(100))
    assert stream.validation
    assert any("held-out fifth of the training images (seed 1)" in note for note in stream.notes)
    for task in stream.tasks:
        assert set(task.test.labels.tolist()) <= set(task.classes)


def test_validation_is_drawn_from_all_training_images_by_the_seed() -> None:
    def held_out(seed: int) -> list[int]:
        stream = make_stream(make_source(5, 40), tasks=5, seed=seed, validation=True)
        return sorted(int(i) for task in stream.tasks for i in task.test.indices)

    assert held_out(1) == held_out(1)
    assert held_out(1) != held_out(2)
    per_class = [np.bincount(np.array(held_out(seed)) % 5, minlength=5) for seed in range(5)]
    assert any(counts.max() > counts.min() for counts in per_class)  # not a fifth of each class
    assert all(counts.sum() == 40 for counts in per_class)


# --- fewer images ---


def test_reduced_streams_have_random_images_of_each_class_drawn_by_the_seed() -> None:
    def drawn(seed: int) -> list[int]:
        stream = make_stream(make_source(5, 40), tasks=5, seed=seed, train_images=7)
        assert "trained on at most 7 images of each class" in stream.notes
        assert all(len(task.train) == 7 and len(task.test) == 1 for task in stream.tasks)
        return sorted(int(i) for task in stream.tasks for i in task.train.indices)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert max(drawn(1)) > 100  # not only the first images


def test_reduced_validation_images_are_not_trained_on() -> None:
    stream = make_stream(
        make_source(5, 40), tasks=2, validation=True, train_images=10, test_images=3
    )
    trained = {int(i) for task in stream.tasks for i in task.train.indices}
    tested = {int(i) for task in stream.tasks for i in task.test.indices}
    assert len(trained) == 50
    assert len(tested) == 15
    assert not trained & tested


def test_classes_with_fewer_images_than_the_limit_use_all() -> None:
    stream = make_stream(make_source(4, 6), tasks=1, train_images=100)
    assert sorted(pixel_values(stream.tasks[0].train)) == list(range(24))


# --- removed domains ---


def test_removed_domains_are_not_trained_but_tested() -> None:
    source = make_source(6, 12, domains=6)
    stream = make_stream(source, tasks=3, remove_domains=4, seed=2)
    for task in stream.tasks:
        assert len(task.removed_domains) == 4
        kept = set(range(6)) - set(task.removed_domains)
        assert task.train.domains is not None
        assert set(task.train.domains.tolist()) == kept
        assert len(task.train) == 2 * 12 * 2 // 6
        assert len(task.test) == 2
    tested = np.concatenate([np.asarray(task.test.domains) for task in stream.tasks])
    assert sorted(tested.tolist()) == list(range(6))
    assert any("4 domains removed" in note for note in stream.notes)


def test_removed_domains_depend_on_seed_and_task_only() -> None:
    def removed(seed: int, tasks: int) -> list[tuple[int, ...]]:
        stream = make_stream(
            make_source(6, 15, domains=15), tasks=tasks, remove_domains=8, seed=seed
        )
        return [task.removed_domains for task in stream.tasks]

    assert removed(1, 3) == removed(1, 3) == removed(1, 6)[:3]
    assert removed(1, 3) != removed(2, 3)
    assert len(set(removed(1, 6))) > 1
    counts = np.bincount([d for seed in range(60) for t in removed(seed, 3) for d in t])
    assert counts == pytest.approx([180 * 8 / 15] * 15, rel=0.3)


def test_class_without_training_images_has_a_row_and_is_listed() -> None:
    # Classes 0 and 1 have images of one domain each, class 2 has both.
    labels, domain_ids = [0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 0, 1]
    images_ = numbered(6)
    source = array_source(
        "toy",
        images_,
        labels,
        numbered(3),
        [0, 1, 2],
        train_domains=domain_ids,
        test_domains=[0, 1, 0],
    )
    stream = make_stream(source, tasks=1, remove_domains=1)
    (task,) = stream.tasks
    (gone,) = task.removed_domains
    assert task.classes == (0, 1, 2)
    assert task.untrained == (gone,)
    assert set(task.train.labels.tolist()) == {1 - gone, 2}
    assert task.test.labels.tolist() == [0, 1, 2]
    assert any("1 classes have no training image" in note for note in stream.notes)


def test_validation_images_have_all_domains() -> None:
    stream = make_stream(make_source(4, 30, domains=3), tasks=2, remove_domains=1, validation=True)
    for task in stream.tasks:
        assert task.train.domains is not None
        assert task.test.domains is not None
        assert len(set(task.train.domains.tolist())) == 2
        assert len(set(task.test.domains.tolist())) == 3


def test_no_domains_are_removed_by_default() -> None:
    for task in make_stream(make_source(6, 6, domains=3), tasks=2).tasks:
        assert task.removed_domains == ()
        assert task.untrained == ()
        assert len(task.train) == 18


# --- what can be wrong ---


@pytest.mark.parametrize(
    "rules",
    [{}, {"tasks": 2, "classes_per_task": 3}, {"tasks": 2, "class_lists": [["c0"]]}],
)
def test_exactly_one_rule_is_required(rules: dict[str, int]) -> None:
    with pytest.raises(BadOption, match="exactly one of tasks, classes_per_task and class_lists"):
        make_stream(make_source(), **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tasks": 0}, "'tasks'.*0 is less than 1"),
        ({"classes_per_task": 0}, "'classes_per_task'.*0 is less than 1"),
        ({"tasks": 2, "seed": -1}, "'seed'.*-1 is negative"),
        ({"tasks": 2, "train_images": 0}, "'train_images'.*0 is less than 1"),
        ({"tasks": 2, "test_images": -2}, "'test_images'.*-2 is less than 1"),
        ({"tasks": 2, "remove_domains": -1}, "'remove_domains'.*-1 is negative"),
        (
            {"tasks": 2, "remove_domains": 3},
            "3 of 3 domains leaves no training image; use at most 2",
        ),
        ({"class_lists": ["c0", "c1"]}, "a list of class names for each task, not a string"),
        ({"class_lists": "c0"}, "a list of class names for each task, not a string"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, int], problem: str) -> None:
    with pytest.raises(BadOption, match=problem):
        make_stream(make_source(domains=3), **options)  # type: ignore[arg-type]


def test_removing_domains_requires_domain_labels() -> None:
    with pytest.raises(BadOption, match="the images of 'toy' have no domain labels"):
        make_stream(make_source(), tasks=2, remove_domains=1)


def test_more_tasks_than_classes_is_an_error() -> None:
    with pytest.raises(EmptyTask, match="Task 7 has no class: 8 tasks of 6 classes"):
        make_stream(make_source(6), tasks=8)


@pytest.mark.parametrize(("lists", "task"), [([], 1), ([[]], 1), ([["c0"], []], 2)])
def test_empty_class_list_is_an_error(lists: list[list[str]], task: int) -> None:
    with pytest.raises(EmptyTask, match=f"Task {task} has no class"):
        make_stream(make_source(), class_lists=lists)


def test_task_without_training_images_is_an_error() -> None:
    source = array_source(
        "toy", numbered(2), [0, 1], numbered(3), [0, 1, 2], class_names=["a", "b", "c"]
    )
    with pytest.raises(EmptyTask, match=r"Task 3 has no training image\. Give every task"):
        make_stream(source, tasks=3)
    (task,) = make_stream(
        source, tasks=1
    ).tasks  # beside classes that have some, it is only untrained
    assert task.untrained == (2,)


def test_task_emptied_by_removed_domains_names_them() -> None:
    source = array_source(
        "toy",
        numbered(10),
        np.arange(10),
        numbered(10),
        np.arange(10),
        train_domains=[0] * 10,
        domain_names=["art", "toy"],
    )
    with pytest.raises(EmptyTask, match="no training image without the domains art"):
        make_stream(source, tasks=10, remove_domains=1)  # one task in two loses its only domain


def test_task_without_test_images_is_noted() -> None:
    source = array_source("toy", numbered(2), [0, 1], numbered(1), [0])
    assert make_stream(source, tasks=2).notes == ("task 2 has no test image",)


def test_class_in_two_tasks_is_an_error() -> None:
    with pytest.raises(ClassInTwoTasks, match="'c1' is in task 1 and in task 2"):
        make_stream(make_source(), class_lists=[["c0", "c1"], ["c2", "c1"]])


def test_unknown_class_suggests_the_nearest_name() -> None:
    source = make_source(3, names=("tabby cat", "collie", "emu"))
    with pytest.raises(UnknownName, match=r"no class 'taby cat'\. Did you mean 'tabby cat'\?"):
        make_stream(source, class_lists=[["taby cat"]])


# --- samples ---


def test_subset_selects_by_positions_or_mask_in_order() -> None:
    (task,) = make_stream(make_source(3, 2), tasks=1).tasks
    assert pixel_values(task.train.subset([4, 0, 4])) == [4, 0, 4]
    assert task.train.subset([4, 0]).labels.tolist() == [1, 0]
    assert pixel_values(task.train.subset(task.train.labels == 2)) == [2, 5]
    assert len(task.train.subset([])) == 0


def test_concat_joins_samples_of_several_splits() -> None:
    first, second = (
        Samples(ArraySplit(numbered(4, start), [0] * 4, [7] * 4), np.array(at), np.array(rows))
        for start, at, rows in ((0, [3, 1], [0, 1]), (100, [0, 2, 3], [5, 6, 7]))
    )
    both = Samples.concat([first, second, first])
    assert pixel_values(both) == [3, 1, 100, 102, 103, 3, 1]
    assert both.labels.tolist() == [0, 1, 5, 6, 7, 0, 1]
    assert both.domains is not None
    assert both.domains.tolist() == [7] * 7
    again = Samples.concat([second, both.subset([6, 3]), both])
    assert pixel_values(again) == [100, 102, 103, 1, 102, 3, 1, 100, 102, 103, 3, 1]
    assert len(again.split) == 8  # a join of joins is flat, no split is in it twice
    assert pixel_values(pickle.loads(pickle.dumps(again))) == pixel_values(again)


def test_concat_drops_unused_splits() -> None:
    first, second = (
        Samples(ArraySplit(numbered(3, start), [0] * 3), np.arange(3), np.arange(3))
        for start in (0, 50)
    )
    joined = Samples.concat([first, second])
    assert Samples.concat([joined.subset([4, 5])]).split is second.split
    assert Samples.concat([first, first.subset([1])]).split is first.split
    assert pixel_values(Samples.concat([joined.subset([4, 5]), second])) == [51, 52, 50, 51, 52]


def test_concat_has_no_domains_if_one_split_has_none() -> None:
    known = Samples(ArraySplit(numbered(1), [0], [0]), np.array([0]), np.array([0]))
    unknown = Samples(ArraySplit(numbered(1), [0]), np.array([0]), np.array([0]))
    assert Samples.concat([known, unknown]).domains is None


def test_concat_accepts_empty_samples_but_not_an_empty_list() -> None:
    (task,) = make_stream(make_source(3, 2), tasks=1).tasks
    empty = task.train.subset([])
    assert len(Samples.concat([empty, empty])) == 0
    assert pixel_values(Samples.concat([empty, task.test])) == [200, 201, 202]
    with pytest.raises(ValueError, match="nothing to concatenate"):
        Samples.concat([])


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 4), max_size=6)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_concat_and_subset_preserve_pairs_of_image_and_label(
    parts: list[tuple[int, list[int]]], chance: object
) -> None:
    splits = [ArraySplit(numbered(5, 10 * number), np.zeros(5, int)) for number in range(3)]
    expected: list[int] = []
    samples: Samples | None = None
    for which, at in parts:
        values = [10 * which + place for place in at]
        part = Samples(splits[which], np.array(at, np.int64), np.array(values, np.int64))
        samples = part if samples is None else Samples.concat([samples, part])
        expected += values
        order = list(range(len(expected)))
        chance.shuffle(order)  # type: ignore[attr-defined]
        samples = samples.subset(order)
        expected = [expected[position] for position in order]
    assert samples is not None
    assert pixel_values(samples) == expected == samples.labels.tolist()


def test_samples_with_a_missing_label_are_rejected() -> None:
    with pytest.raises(ValueError, match="indices"):
        Samples(ArraySplit(numbered(2), [0, 0]), np.arange(2), np.arange(1))


def test_streams_are_immutable() -> None:
    stream = make_stream(make_source(), tasks=2)
    with pytest.raises(FrozenInstanceError):
        stream.name = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        stream.tasks[0].train.split = None  # type: ignore[misc, assignment]


# --- workers ---


class Views(Dataset[torch.Tensor]):
    """What the engine does with samples, in short."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> torch.Tensor:
        rng = view_generator(5, 0, 0, int(self.samples.indices[position]))
        pixels = Preprocessing(8, 1, (0.5,), (0.5,))
        image = self.samples.image(position)
        return torch.from_numpy(training_view(image, pixels, Augmentation(), rng))


def test_views_are_independent_of_workers_batches_and_order() -> None:
    rng = np.random.default_rng(0)
    arrays = rng.integers(0, 256, (24, 12, 12), np.uint8)
    stream: Stream = make_stream(
        array_source("toy", arrays, np.arange(24) % 3, arrays[:3], [0, 1, 2]), tasks=1
    )
    views = Views(stream.tasks[0].train)
    alone = torch.stack([views[position] for position in range(24)])
    for workers, batch in ((0, 24), (2, 5)):
        loaded = torch.cat(list(DataLoader(views, batch_size=batch, num_workers=workers)))
        assert torch.equal(loaded, alone)
    order = rng.permutation(24)
    shuffled = Views(stream.tasks[0].train.subset(order))
    assert torch.equal(torch.stack([shuffled[p] for p in range(24)]), alone[order])


def test_validation_is_the_last_fifth_of_the_seeded_permutation() -> None:
    stream = make_stream(make_source(5, 40), tasks=1, seed=3, validation=True)
    purpose = int.from_bytes(b"validation", "big")
    permuted = np.random.default_rng((3, 0, purpose)).permutation(200)
    assert sorted(stream.tasks[0].test.indices.tolist()) == sorted(permuted[160:].tolist())
    assert sorted(stream.tasks[0].train.indices.tolist()) == sorted(permuted[:160].tolist())
