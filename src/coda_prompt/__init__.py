"""Continual image classification with CODA-Prompt and the methods it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_prompt.learner.classifier import ContinualClassifier

__version__ = "0.1.0"
__all__ = ["ContinualClassifier", "__version__", "load"]


def load(folder: str) -> ContinualClassifier:
    """Load a classifier that was saved to a folder."""
    from coda_prompt.learner.classifier import ContinualClassifier

    return ContinualClassifier.load(folder)


def __getattr__(name: str) -> Any:
    """Import the classifier at first use: torch takes a second to import."""
    if name == "ContinualClassifier":
        from coda_prompt.learner.classifier import ContinualClassifier

        return ContinualClassifier
    raise AttributeError(f"module 'coda_prompt' has no attribute '{name}'")
