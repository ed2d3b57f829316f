"""The card that travels with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coda_prompt.learner.store import Description

SHOWN = 40


def card_of(description: Description) -> str:
    """Markdown with the hub's front matter."""
    classes, tasks = description.classes, description.tasks
    shown = ", ".join(classes[:SHOWN]) + (", …" if len(classes) > SHOWN else "")
    lines = [
        "---",
        "library_name: coda-prompt",
        "pipeline_tag: image-classification",
        "tags: [continual-learning, image-classification]",
        "---",
        "",
        f"# An image classifier of {len(classes)} classes, learned in {len(tasks)} tasks",
        "",
        f"Method `{description.method}` on the frozen backbone `{description.backbone.name}`, by "
        f"coda-prompt {description.coda_prompt}. The file holds what was learned; it holds neither "
        "the backbone nor any training image.",
        "",
        f"Classes: {shown}",
        "",
        "| task | date | new classes | continued | images | accuracy when learned | own classes |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {number + 1} | {task.date[:10]} | {len(task.new)} | {len(task.continued)} "
        f"| {sum(task.images.values())} | {percent(task.accuracy)} "
        f"| {percent(task.accuracy_own)} |"
        for number, task in enumerate(tasks)
    ]
    lines += [
        "",
        "Accuracies are of held-out images of the task, when it was learned: among all classes "
        "known then, and among the task's own.",
        "",
        "```python",
        "from coda_prompt import ContinualClassifier",
        "",
        'classifier = ContinualClassifier.from_pretrained("path/or/owner/name")',
        'classifier.predict(["image.png"])',
        "```",
    ]
    return "\n".join(lines) + "\n"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
