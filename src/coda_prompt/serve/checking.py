"""Images of known classes, to measure what a lesson made the model forget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coda_prompt.learner.classifier import ContinualClassifier
from coda_prompt.learner.results import Learned
from coda_prompt.serve.uploads import Example, decode_image

MAX_PER_CLASS, MAX_HELD_OUT = 4, 32
"""Held-out images of each class and of all classes."""


@dataclass(frozen=True, eq=False)
class CheckImage:
    """An image of a known class, as an array or as an uploaded file."""

    label: str
    content: Any

    def decode(self) -> Any:
        """Return the image as the classifier reads it."""
        if isinstance(self.content, bytes):
            return decode_image(self.content, f"a held-out image of {self.label}")
        return self.content


class CheckImages:
    """Images that lessons have held out.

    They are in memory only, as long as the learning process runs.
    """

    def __init__(self) -> None:
        self._held_out: dict[str, list[CheckImage]] = {}
        self._sha256: str | None = None
        self._right: dict[CheckImage, bool] = {}
        """Whether the version with the hash `_sha256` predicts an image right."""

    def add(self, examples: Sequence[Example], learned: Learned) -> None:
        """Hold the images in memory that a lesson has held out."""
        added: dict[str, list[CheckImage]] = {}
        for example in (examples[index] for index in learned.held_out_images):
            image = CheckImage(example.label, example.content)
            added.setdefault(example.label, []).append(image)
        for name, own in added.items():
            self._held_out[name] = own[:MAX_PER_CLASS]

    def images(self, classifier: ContinualClassifier, classes: Sequence[str]) -> list[CheckImage]:
        """Return the images of some classes."""
        names = [name for name in classes if name in self._held_out][-MAX_HELD_OUT:]
        count = max(1, MAX_HELD_OUT // max(1, len(names)))
        images = [image for name in names for image in self._held_out[name][:count]]
        return images

    def accuracy(
        self, classifier: ContinualClassifier, sha256: str | None, classes: Sequence[str]
    ) -> float | None:
        """Measure the accuracy of some classes; None if there are no images of them.

        Images are classified once for each version.

        Args:
            classifier: The model.
            sha256: Hash of its version.
            classes: The classes whose images are checked.
        """
        if sha256 != self._sha256:
            self._sha256, self._right = sha256, {}
        images = self.images(classifier, classes)
        if new := [image for image in images if image not in self._right]:
            predicted = classifier.predict([image.decode() for image in new])
            right = predicted == [image.label for image in new]
            self._right.update(zip(new, right.tolist(), strict=True))
        return float(np.mean([self._right[image] for image in images])) if images else None
