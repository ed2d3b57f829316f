"""The model card: README.md of a model folder and of the hub."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from coda_prompt.console import escape_control_characters
from coda_prompt.errors import counted, join_names

if TYPE_CHECKING:
    from coda_prompt.learner.records import Description, TaskRecord

MAX_CLASSES_SHOWN = 40
FEW_IMAGES = 10
"""Shares of fewer images are shown as counts: a percentage would look more certain than it is."""
TASK_HEADS = [
    "lesson",
    "date",
    "new",
    "continued",
    "images",
    "accuracy",
    "among own classes",
]
"""Columns of the table of lessons."""


def model_card(description: Description) -> str:
    """Return the card as Markdown with the hub's front matter."""
    classes, tasks = description.classes, description.tasks
    more = ", …" if len(classes) > MAX_CLASSES_SHOWN else ""
    lines = [
        "---",
        "library_name: coda-prompt",
        "pipeline_tag: image-classification",
        "tags: [continual-learning, image-classification]",
        "---",
        "",
        f"# Image classifier with {counted(len(classes), 'class')}, learned in "
        f"{counted(len(tasks), 'lesson')}",
        "",
        f"Method {_plain(description.method)} on the frozen backbone "
        f"{_plain(description.backbone.name)}, trained with coda-prompt "
        f"{_plain(description.coda_prompt)}. The file has only what was learned: neither the "
        "backbone nor any training image.",
        "",
        f"Classes: {', '.join(map(_plain, classes[:MAX_CLASSES_SHOWN]))}{more}",
        "",
        "| lesson | date | new classes | continued | images | accuracy then | own classes |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {number + 1} | {_plain(task.date[:10])} | {len(task.new)} | {len(task.continued)} "
        f"| {sum(task.images.values())} | {share_of(task.accuracy, task.held_out)} "
        f"| {share_of(task.accuracy_own, task.held_out)} |"
        for number, task in enumerate(tasks)
    ]
    lines += [
        "",
        "Accuracies are on held-out images of the lesson right after it was learned: among all "
        "classes known at that time, and among the lesson's own classes.",
        "",
        "```python",
        "from coda_prompt import ContinualClassifier",
        "",
        'classifier = ContinualClassifier.from_pretrained("path/or/owner/name")',
        'classifier.predict(["image.png"])',
        "```",
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is: no HTML, no markup, no links, on one line."""
    line = html.escape(escape_control_characters(text).replace("\n", " "), quote=False)
    return re.sub(r"[\\`*_~\[\]()#!|:@./]", r"\\\g<0>", line)


def percent(share: float | None) -> str:
    """Format a fraction; `-` if there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def share_of(share: float | None, images: int) -> str:
    """Format a share of images: `3 of 4` if they are few, else a percentage; `-` if there is none.

    Args:
        share: The share; None if it is not known.
        images: Number of images; 0 if it is not known.
    """
    if share is None or not 0 < images < FEW_IMAGES:
        return percent(share)
    return f"{round(share * images)} of {images}"


def task_rows(tasks: Iterable[TaskRecord]) -> list[list[object]]:
    """Return the table of lessons, with the columns `TASK_HEADS`."""
    rows: list[list[object]] = []
    for number, task in enumerate(tasks, 1):
        classes = (join_names(names, 6) for names in (task.new, task.continued))
        shares = [share_of(each, task.held_out) for each in (task.accuracy, task.accuracy_own)]
        rows.append([number, task.date[:10], *classes, sum(task.images.values()), *shares])
    return rows
