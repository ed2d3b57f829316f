"""The learner's verbs behind their options: results to standard output, all else to errors."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from coda_prompt.errors import BadOption, MissingData
from coda_prompt.learner import store
from coda_prompt.learner.card import card_of, percent
from coda_prompt.learner.classifier import ContinualClassifier, Learned
from coda_prompt.learner.inputs import Labelled, image_paths
from coda_prompt.training.settings import Event

UNKNOWN = "unknown"
AT_ONCE = 512
"""Images that are predicted before results are printed."""


def learn(
    model: Path,
    folder: str,
    *,
    backbone: str | None,
    method: str | None,
    options: dict[str, Any],
    validation: float,
    watch: Path | None,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Make or continue a model; the folder is replaced in one step when all is learned."""
    messages = Console(stderr=True)
    with store.writing(model):
        if (model / store.MODEL).exists():
            classifier = ContinualClassifier.load(model)
            _refuse_changes(classifier, backbone, method, options)
        else:
            given = {"backbone": backbone, "method": method}
            chosen = {name: value for name, value in given.items() if value is not None}
            classifier = ContinualClassifier(**chosen, **options)

        def tell_start(images: Labelled, warnings: list[str]) -> None:
            counts = images.counts()
            messages.print(
                f"{len(counts)} classes, {sum(counts.values())} images "
                f"({min(counts.values())} to {max(counts.values())} a class)"
                + (f", {len(images.bad)} unreadable files left out" if images.bad else "")
                + f"; {classifier.method_name} on {classifier.backbone_name}",
                highlight=False,
            )
            for warning in warnings:
                messages.print(f"warning: {warning}", style="yellow", highlight=False)

        with LearnProgress(messages) as progress:
            learned = classifier.learn(
                folder,
                validation=validation,
                watch=watch,
                skip_bad=skip_bad,
                on_event=progress.on_event,
                on_start=tell_start,
            )
        classifier.write(model)
    if as_json:
        _print_json(dataclasses.asdict(learned))
        return
    _show_learned(learned, classifier, model)


class LearnProgress:
    """A bar with ETA over the epochs of one task."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._line = self._bar.add_task("learning", total=None)

    def __enter__(self) -> LearnProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_event(self, event: Event) -> None:
        if event.kind in ("step", "epoch"):
            done = event.epoch * event.steps + event.step
            where = f"learning, epoch {event.epoch + 1}/{event.epochs}, loss {event.loss:.2f}"
            total = event.epochs * event.steps
            self._bar.update(self._line, completed=done, total=total, description=where)


def predict(
    model: Path,
    places: Sequence[str],
    *,
    top: int,
    unknown_below: float,
    as_json: bool,
    as_csv: bool,
) -> None:
    if as_json and as_csv:
        raise BadOption("coda predict", "csv", "ask for JSON or CSV, not for both")
    classifier = ContinualClassifier.load(model)
    if list(places) == ["-"]:
        places = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    paths = image_paths(places)
    if not paths:
        raise MissingData("coda predict", "there is no image to predict", "Name files or folders.")
    rows = []
    for start in range(0, len(paths), AT_ONCE):
        part = paths[start : start + AT_ONCE]
        rows += _predicted(classifier, part, top, unknown_below)
    if as_json:
        _print_json(rows)
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["path", "label", "probability"])
        writer.writerows([row["path"], row["label"], f"{row['probability']:.6f}"] for row in rows)
    else:
        table = Table("image", "class", "probability", *(["next best"] if top > 1 else []))
        for row in rows:
            others = ", ".join(
                f"{each['label']} {100 * each['probability']:.0f} %" for each in row["top"][1:]
            )
            shown = [row["path"], row["label"], f"{100 * row['probability']:.1f} %"]
            table.add_row(*shown, *([others] if top > 1 else []))
        _output().print(table)


def evaluate(model: Path, folder: str, *, as_json: bool) -> None:
    classifier = ContinualClassifier.load(model)
    found = classifier.evaluate(folder)
    if as_json:
        _print_json(dataclasses.asdict(found))
        return
    output = _output()
    tasks = Table(
        "task", "classes", "images", "accuracy", "among own classes", "own, when learned",
        title="What each task kept",
    )  # fmt: skip
    then = {tuple(task["new"]): task["accuracy_own"] for task in classifier.tasks_}
    for number, task in enumerate(found.tasks):
        tasks.add_row(
            str(number + 1),
            _listed(task.classes),
            str(task.images),
            percent(task.accuracy),
            percent(task.accuracy_own),
            percent(then.get(task.classes)),
        )
    classes = Table("class", "images", "accuracy", title="Classes, weakest first")
    for name, own in sorted(found.classes.items(), key=lambda item: item[1].accuracy):
        classes.add_row(name, str(own.images), percent(own.accuracy))
    output.print(classes)
    output.print(tasks)
    output.print(
        f"{found.images} images: {percent(found.accuracy)} right; "
        f"expected calibration error {percent(found.calibration_error)}",
        highlight=False,
    )


def info(model: Path, *, as_json: bool) -> None:
    """What a model says of itself; its backbone is not needed."""
    held = store.read_model(model)
    sizes = store.size_on_disk(model)
    if as_json:
        _print_json({**held.description, "bytes": sizes})
        return
    description = held.description
    output = _output()
    output.print(
        f"{model}: {len(description['classes'])} classes in {len(description['tasks'])} tasks, "
        f"{description['method']} on {description['backbone']['name']}, "
        f"{sizes[store.MODEL] / 1e6:.2f} MB"
        + (
            f" (and {sizes[store.PREVIOUS] / 1e6:.2f} MB to undo the newest task)"
            if store.PREVIOUS in sizes
            else ""
        ),
        highlight=False,
    )
    table = Table("task", "date", "new", "continued", "images", "accuracy then", "own classes then")
    for number, task in enumerate(description["tasks"]):
        table.add_row(
            str(number + 1),
            str(task["date"])[:10],
            _listed(task["new"]),
            _listed(task["continued"]),
            str(sum(task["images"].values())),
            percent(task["accuracy"]),
            percent(task["accuracy_own"]),
        )
    output.print(table)


def undo(model: Path) -> None:
    store.read_model(model)  # a folder that is no model is told so
    with store.writing(model):
        previous = store.read_previous(model)
        card = card_of(previous.description) if previous else ""
        store.restore_previous(model, card)
    kept = store.read_model(model).description
    Console(stderr=True).print(
        f"{model}: back to {len(kept['classes'])} classes in {len(kept['tasks'])} tasks",
        highlight=False,
    )


def export(model: Path, out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise MissingData(out.parent, "there is no such folder", "Make it first.")
    ContinualClassifier.load(model).export_onnx(out)
    Console(stderr=True).print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", highlight=False)


def _predicted(
    classifier: ContinualClassifier, paths: Sequence[str], top: int, unknown_below: float
) -> list[dict[str, Any]]:
    rows = []
    for path, own in zip(paths, classifier.predict_proba(paths), strict=True):
        best = own.argsort()[::-1][: max(1, top)]
        ranked = [
            {"label": classifier.classes_[row], "probability": float(own[row])} for row in best
        ]
        sure = ranked[0]["probability"] >= unknown_below
        label = ranked[0]["label"] if sure else UNKNOWN
        probability = ranked[0]["probability"]
        rows.append({"path": path, "label": label, "probability": probability, "top": ranked})
    return rows


def _refuse_changes(
    classifier: ContinualClassifier,
    backbone: str | None,
    method: str | None,
    options: dict[str, Any],
) -> None:
    """A model stays what it was made as; only how the next task is trained may change."""
    for name, given, held in (
        ("backbone", backbone, classifier.backbone_name),
        ("method", method, classifier.method_name),
    ):
        if given not in (None, held):
            problem = f"this model was made with {held}; make another model for {given}"
            raise BadOption("coda learn", name, problem)
    classifier.set_training(**options)


def _show_learned(learned: Learned, classifier: ContinualClassifier, model: Path) -> None:
    output = _output()
    new, continued = _listed(learned.new) or "none", _listed(learned.continued) or "none"
    output.print(f"new: {new}; continued: {continued}", highlight=False)
    if learned.accuracy is not None:
        output.print(
            f"on {learned.held_out} held-out images: {percent(learned.accuracy)} among all "
            f"{len(classifier.classes_)} classes, {percent(learned.accuracy_own)} among its own; "
            f"calibration error {percent(learned.calibration_error)}",
            highlight=False,
        )
    for name, (before, after) in learned.forgotten.items():
        if after != before:
            output.print(f"{name}: {percent(before)} -> {percent(after)}", highlight=False)
    if learned.forgotten:
        pairs = list(learned.forgotten.values())
        means = [sum(part) / len(pairs) for part in zip(*pairs, strict=True)]
        output.print(
            f"watched classes: {percent(means[0])} -> {percent(means[1])}", highlight=False
        )
    size = (model / store.MODEL).stat().st_size / 1e6
    output.print(f"{model}: {size:.2f} MB, learned in {learned.seconds:.1f} s", highlight=False)


def _listed(names: Sequence[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _output() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=240)


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))  # noqa: T201
