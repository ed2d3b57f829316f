"""Editing what a classifier was taught; `learner/editing.py` has the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coda_prompt.images.labelled import labelled
from coda_prompt.learner import editing, reports
from coda_prompt.learner.saving import SavedEstimator
from coda_prompt.research.methods.additive import is_removable

if TYPE_CHECKING:
    from typing_extensions import Self


class EditableEstimator(SavedEstimator):
    """A classifier whose classes can be renamed, merged, forgotten, relabelled and joined."""

    @property
    def removable(self) -> bool:
        """Whether a class can be forgotten without a trace in shared sums."""
        return is_removable(self.network.method)

    def rename(self, old: str, new: str) -> None:
        """Give a class another name.

        Raises:
            NotLearned: There is no class `old`.
            CannotEdit: There is a class `new` already; `merge_classes` merges them.
        """
        editing.rename(self, old, new)

    def merge_classes(self, names: Sequence[str], into: str) -> None:
        """Unite classes into one, as if their images had been taught under one name.

        Args:
            names: Two or more known classes.
            into: Name of the class they become: one of them, or a new name.

        Raises:
            CannotEdit: The method is not in closed form, or the name belongs to another class.
        """
        editing.merge_classes(self, names, into)

    def forget(self, name: str) -> editing.Forgotten:
        """Remove a class from the model and from all its versions; this cannot be undone.

        Stored versions are rewritten when the classifier is saved.

        Returns:
            What of it remains in sums over all classes; nothing in a removable model.

        Raises:
            CannotEdit: The method is not in closed form, or it is the only class.
        """
        return editing.forget(self, name)

    def relabel(self, data: Any, labels: Any = None, *, taught_as: str) -> dict[str, int]:
        """Move images that were taught as the wrong class to the right one.

        Images that were held out when they were taught have no part in the class and must not be
        among them.

        Args:
            data: The same images with the right labels, as for `learn`.
            labels: Class names, one for each image.
            taught_as: The class they were taught as.

        Returns:
            The number of images that each class received.

        Raises:
            CannotEdit: The method is not in closed form, or the class has no more images.
        """
        return editing.relabel(self, labelled(data, labels), taught_as)

    @classmethod
    def merge(cls, classifiers: Sequence[Self], *, count_twice: bool = False) -> Self:
        """Join what classifiers have learned on the same backbone; classes of one name are merged.

        The result equals one classifier that was taught the lessons of all, in this order.

        Args:
            classifiers: Two or more.
            count_twice: Join them also if they have learned the same images, which then count more
                than once. These are recognised by their hashes (`find_duplicates` in `learn`);
                without hashes, only the same files and classes of the same images are.

        Raises:
            CannotEdit: Method, options or backbone differ, the method is not in closed form, or
                two of them have learned the same images, without `count_twice`.
        """
        return editing.merge(classifiers, count_twice)

    def history(self) -> reports.ModelHistory:
        """Return the lessons and edits, and the versions that can be restored."""
        folder = self._home and self._home[0]
        return reports.history(self._model(), self._history, folder)
