"""Images of known classes, to measure what a lesson made the model forget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coda_prompt.data.pocket import pocket_source
from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.results import Learned
from coda_prompt.serve.uploads import Example, decode_image

TEST_DRAWINGS = 5
"""Test drawings of each class of pocket."""
MAX_PER_CLASS, MAX_HELD_OUT = 4, 32
"""Held-out images of each class and of all classes."""


class CheckImages:
    """Test drawings of the classes of pocket, and held-out images of the lessons so far.

    Held-out images are in memory only, as long as the learning process runs.
    """

    def __init__(self) -> None:
        self._held_out: dict[str, list[Example]] = {}
        self._accuracies: dict[str, float] = {}
        """By the hash of the version and the number of images."""

    def add(self, examples: Sequence[Example], learned: Learned) -> None:
        """Hold the images in memory that a lesson has held out."""
        added: dict[str, list[Example]] = {}
        for index in learned.held_out_images:
            added.setdefault(examples[index].label, []).append(examples[index])
        for name, own in added.items():
            self._held_out[name] = own[:MAX_PER_CLASS]

    def labels(self, classifier: ContinualClassifier, classes: Sequence[str]) -> list[str]:
        """Return the class of each image to check."""
        return self._images(classifier, classes)[1]

    def accuracy(
        self, classifier: ContinualClassifier, sha256: str | None, classes: Sequence[str]
    ) -> float | None:
        """Measure the accuracy of some classes; None if there are no images of them.

        Args:
            classifier: The model.
            sha256: Hash of its version.
            classes: The classes whose images are checked.
        """
        images, labels = self._images(classifier, classes)
        key = f"{sha256} {len(labels)}"
        if labels and key not in self._accuracies:
            self._accuracies[key] = classifier.score(images, labels)
        return self._accuracies.get(key)

    def _images(
        self, classifier: ContinualClassifier, classes: Sequence[str]
    ) -> tuple[list[Any], list[str]]:
        pairs: list[tuple[Any, str]] = []
        if classifier.backbone_name == "pocket":
            pairs += _test_drawings(classes)
        names = [name for name in classes if name in self._held_out][-MAX_HELD_OUT:]
        count = max(1, MAX_HELD_OUT // max(1, len(names)))
        pairs += [
            (decode_image(example.content, f"a held-out image of {name}"), name)
            for name in names
            for example in self._held_out[name][:count]
        ]
        return [image for image, _ in pairs], [name for _, name in pairs]


def _test_drawings(classes: Sequence[str]) -> list[tuple[Any, str]]:
    """Return test drawings of the classes that pocket has."""
    source = pocket_source()
    images: Any = source.test
    return [
        (images.images[index], name)
        for row, name in enumerate(source.class_names)
        if name in classes
        for index in np.flatnonzero(images.labels == row)[:TEST_DRAWINGS]
    ]
