"""Commands for one model: learn, predict, evaluate, info, undo, export."""

import contextlib
import csv
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn

from coda_prompt.cli.options import (
    AsCsv,
    AsJson,
    Backbone,
    Device,
    Epochs,
    Folder,
    Images,
    LearnQueries,
    Method,
    Model,
    Precision,
    SkipBad,
    Top,
    UnknownBelow,
    Validation,
    Watch,
    device_options,
    with_options,
)
from coda_prompt.console import (
    ProgressBar,
    decode_file_name,
    print_json,
    print_line,
    stderr_console,
    stdout_console,
    table,
)
from coda_prompt.errors import (
    BadImage,
    BadImages,
    BadOption,
    CorruptFile,
    LearnedBefore,
    MissingData,
    join_names,
)

if TYPE_CHECKING:
    from coda_prompt.data.resolve import Labelled
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.results import Learned
    from coda_prompt.training.devices import Devices
    from coda_prompt.training.settings import Event

app = typer.Typer()

AT_ONCE = 64
"""Images that are read and predicted together."""


@app.command(
    epilog="Examples: `coda learn my-model photos/`; "
    "`coda learn my-model more-photos/ --watch validation-photos/`; "
    "`coda learn my-model photos/ --backbone vit-b16-in21k --method coda-p --epochs 10`"
)
@with_options(devices=device_options)
def learn(
    model: Model,
    folder: Folder,
    backbone: Backbone = None,
    method: Method = None,
    epochs: Epochs = None,
    queries: LearnQueries = None,
    val: Validation = 0.2,
    watch: Watch = None,
    precision: Precision = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    *,
    devices: "Devices",
) -> None:
    """Learn classes from a folder of images; creates the model if it does not exist.

    Subfolders named like known classes continue these classes. No image is stored.
    """
    from coda_prompt.learner import store
    from coda_prompt.learner.advice import summary
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.shutdown import ShutdownFlag
    from coda_prompt.training.checkpointing import heed
    from coda_prompt.training.devices import any_rank

    devices = dataclasses.replace(devices, precision=precision or "32-true")
    stop = ShutdownFlag()
    with devices.launch_processes() as fabric, contextlib.ExitStack() as heeding:
        console, first = stderr_console(), fabric.global_rank == 0
        if first:
            heeding.enter_context(store.exclusive_writer(model))
        if (model / store.MODEL).exists():
            classifier = ContinualClassifier.load(model, fabric=fabric)
            _refuse_changes(classifier, backbone, method)
        else:
            given = {"backbone": backbone, "method": method}
            chosen = {name: value for name, value in given.items() if value is not None}
            classifier = ContinualClassifier(**chosen, fabric=fabric)

        def tell_start(images: "Labelled", warnings: list[str]) -> None:
            lesson = f"{images.split.fingerprint()} {images.names}"
            if first and store.begin_lesson(model, lesson, len(classifier.tasks_)):
                store.refresh_copies(model)
                store.end_lesson(model)
                raise LearnedBefore(model)
            print_line(
                console,
                f"{summary(images)}; {classifier.method_name} on {classifier.backbone_name}",
            )
            for problem in images.bad:
                print_line(console, f"left out: {problem}")
            for warning in warnings:
                print_line(console, f"warning: {warning}", style="yellow")
            heeding.enter_context(stop.handling_signals())

        asked = any_rank(fabric, stop)
        with Going(console) as going:

            def tell(event: "Event") -> None:
                heed(asked, event)
                going.on_event(event)

            learned = classifier.learn(
                folder,
                validation=val,
                watch=watch,
                skip_bad=skip_bad,
                epochs=epochs,
                queries=queries,
                progress=model / store.PROGRESS,
                stop=stop,
                on_event=tell,
                on_start=tell_start,
            )
        if first:
            classifier.write(model)
            if as_json:
                print_json(dataclasses.asdict(learned))
            else:
                _show_learned(learned, classifier, model)
            sys.stdout.flush()
            store.end_lesson(model)  # from here on the same command is another lesson


@app.command(
    epilog="Examples: `coda predict my-model image.png`; `coda predict my-model photos/ --json`; "
    "`find . -name '*.jpg' | coda predict my-model - --csv`; "
    "`coda predict my-model *.png --top 3 --unknown-below 0.5`"
)
def predict(
    model: Model,
    images: Images,
    top: Top = 5,
    unknown_below: UnknownBelow = 0.0,
    device: Device = "auto",
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Predict the class of images."""
    from coda_prompt.data.resolve import image_paths
    from coda_prompt.learner.classifier import ContinualClassifier

    if as_json and as_csv:
        raise BadOption("coda predict", "csv", "ask for JSON or CSV, not for both")
    classifier = ContinualClassifier.load(model, device=device)
    if images == ["-"]:
        images = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    paths = image_paths(images)
    if not skip_bad:
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            raise BadImages([BadImage(path, "there is no such file") for path in missing])
    if not paths:
        raise MissingData("coda predict", "there is no image to predict", "Name files or folders.")
    rows = _predictions(classifier, paths, top, unknown_below, skip_bad)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["path", "label", "probability"])
        for row in rows:
            writer.writerow([row["path"], row["label"], f"{row['probability']:.6f}"])
    elif as_json:
        print_json(list(rows))
    else:
        heads = ["image", "class", "probability", *(["next best"] if top > 1 else [])]
        stdout_console().print(table(heads, [_shown(row)[: len(heads)] for row in rows]))


@app.command(epilog="Example: `coda evaluate my-model test-photos/`")
def evaluate(
    model: Model,
    folder: Folder,
    device: Device = "auto",
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy of a model: overall, per class and per task."""
    from coda_prompt.learner.card import percent
    from coda_prompt.learner.classifier import ContinualClassifier

    classifier = ContinualClassifier.load(model, device=device)
    with Going(stderr_console()) as going:
        found = classifier.evaluate(folder, skip_bad=skip_bad, on_event=going.on_event)
    for problem in found.left_out:
        print_line(stderr_console(), f"left out: {problem}")
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    weakest = sorted(found.classes.items(), key=lambda item: item[1].accuracy)
    classes = [[name, str(own.images), percent(own.accuracy)] for name, own in weakest]
    console = stdout_console()
    console.print(table(["class", "images", "accuracy"], classes, "Classes, weakest first"))
    then = {number + 1: task for number, task in enumerate(classifier.tasks_)}
    tasks = [
        [
            str(task.number),
            join_names(task.classes, 6),
            str(task.images),
            percent(task.accuracy),
            percent(task.accuracy_own),
            percent(then[task.number]["accuracy_own"]),
        ]
        for task in found.tasks
    ]
    heads = ["task", "classes", "images", "accuracy", "among own classes", "held out, then"]
    console.print(table(heads, tasks, "What each task kept"))
    console.print(
        f"{found.images} images: {percent(found.accuracy)} right; "
        f"expected calibration error {percent(found.calibration_error)}"
    )


@app.command(epilog="Example: `coda info my-model`")
def info(model: Model, as_json: AsJson = False) -> None:
    """Show what a model has learned, when, and its size. Does not need the backbone."""
    from coda_prompt.learner import store
    from coda_prompt.learner.card import percent

    description = store.read_model(model).description
    sizes = store.size_on_disk(model)
    if as_json:
        print_json({**description.model_dump(mode="json"), "bytes": sizes})
        return
    kept = sizes.get(store.PREVIOUS)
    undo = "" if kept is None else f" (and {kept / 1e6:.2f} MB to undo the newest task)"
    console = stdout_console()
    print_line(
        console,
        f"{decode_file_name(str(model))}: {len(description.classes)} classes in "
        f"{len(description.tasks)} tasks, {description.method} on {description.backbone.name}, "
        f"{sizes[store.MODEL] / 1e6:.2f} MB{undo}",
    )
    rows = [
        [
            str(number + 1),
            task.date[:10],
            join_names(task.new, 6),
            join_names(task.continued, 6),
            str(sum(task.images.values())),
            percent(task.accuracy),
            percent(task.accuracy_own),
        ]
        for number, task in enumerate(description.tasks)
    ]
    heads = ["task", "date", "new", "continued", "images", "accuracy then", "own classes then"]
    console.print(table(heads, rows))


@app.command(epilog="Example: `coda undo my-model`")
def undo(model: Model) -> None:
    """Undo the newest task: restores the previous version of the model, bit for bit."""
    from coda_prompt.learner import store

    with contextlib.suppress(CorruptFile):  # a folder that is no model is told so
        store.read_model(model)
    with store.exclusive_writer(model):
        store.restore_previous(model)
    kept = store.read_model(model).description
    where = decode_file_name(str(model))
    print_line(
        stderr_console(), f"{where}: back to {len(kept.classes)} classes in {len(kept.tasks)} tasks"
    )


@app.command(epilog="Example: `coda export my-model model.onnx`")
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The .onnx file to write.")],
) -> None:
    """Export a model and its backbone as one ONNX graph that runs without torch."""
    from coda_prompt.learner.classifier import ContinualClassifier

    if not out.absolute().parent.is_dir():
        raise MissingData(out.parent, "there is no such folder", "Make it first.")
    if out.is_dir():
        raise BadOption("coda export", "out", f"{out} is a folder; name the file to write")
    ContinualClassifier.load(model).export_onnx(out)
    print_line(stderr_console(), f"{decode_file_name(str(out))}: {out.stat().st_size / 1e6:.1f} MB")


class Going(ProgressBar):
    """A bar with ETA over the steps of a training or the images of a pass."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, TimeRemainingColumn())
        self._line = self.bar.add_task("looking", total=None)

    def on_event(self, event: "Event") -> None:
        if event.kind == "pass":
            self._show("looking at images", event.step, event.steps)
        elif event.kind in ("step", "epoch"):
            where = f"learning, epoch {event.epoch + 1}/{event.epochs}, loss {event.loss:.2f}"
            done = event.epoch * event.steps + event.step
            self._show(where, done, event.epochs * event.steps)

    def _show(self, what: str, done: int, total: int) -> None:
        self.bar.update(self._line, description=what, completed=done, total=total)


def _predictions(
    classifier: "ContinualClassifier",
    paths: Sequence[str],
    top: int,
    unknown_below: float,
    skip_bad: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each image, as they come."""
    from coda_prompt.learner.advice import UNKNOWN
    from coda_prompt.training.settings import Event

    classes = classifier.classes_
    with Going(stderr_console()) as going:
        for start in range(0, len(paths), AT_ONCE):
            images, names, bad = _opened(paths[start : start + AT_ONCE], classifier.shortest_side)
            if bad and not skip_bad:
                raise BadImages(bad)
            for problem in bad:
                print_line(stderr_console(), f"left out: {problem}")
            chances: Any = classifier.predict_proba(images) if images else []
            for name, own in zip(names, chances, strict=True):
                best = own.argsort()[::-1][: max(1, top)]
                ranked = [{"label": classes[row], "probability": float(own[row])} for row in best]
                sure = float(own[best[0]])
                label = classes[best[0]] if sure >= unknown_below else UNKNOWN
                yield {"path": name, "label": label, "probability": sure, "top": ranked}
            done = min(start + AT_ONCE, len(paths))
            going.on_event(Event("pass", 0, 0, step=done, steps=len(paths)))


def _opened(paths: Sequence[str], min_side: int) -> tuple[list[Any], list[str], list[BadImage]]:
    from coda_prompt.data.images import open_image

    images, names, bad = [], [], []
    for path in paths:
        try:
            images.append(open_image(path, min_side))
            names.append(decode_file_name(path))
        except BadImage as problem:
            bad.append(problem)
    return images, names, bad


def _shown(row: dict[str, Any]) -> list[str]:
    others = [f"{each['label']} {100 * each['probability']:.0f} %" for each in row["top"][1:]]
    return [row["path"], row["label"], f"{100 * row['probability']:.1f} %", ", ".join(others)]


def _refuse_changes(
    classifier: "ContinualClassifier", backbone: str | None, method: str | None
) -> None:
    """A model stays what it was made as."""
    for name, given, held in (
        ("backbone", backbone, classifier.backbone_name),
        ("method", method, classifier.method_name),
    ):
        if given not in (None, held):
            problem = f"this model was made with {held}; make another model for {given}"
            raise BadOption("coda learn", name, problem)


def _show_learned(learned: "Learned", classifier: "ContinualClassifier", model: Path) -> None:
    from coda_prompt.learner import store
    from coda_prompt.learner.card import percent

    new, continued = (
        join_names(learned.new, 6) or "none",
        join_names(learned.continued, 6) or "none",
    )
    lines = [f"new: {new}; continued: {continued}"]
    if learned.accuracy is not None:
        lines.append(
            f"on {learned.held_out} held-out images: {percent(learned.accuracy)} among all "
            f"{len(classifier.classes_)} classes, {percent(learned.accuracy_own)} among its own; "
            f"calibration error {percent(learned.calibration_error)}"
        )
    for name, (before, after) in learned.forgotten.items():
        if after != before:
            lines.append(f"{name}: {percent(before)} -> {percent(after)}")
    if learned.forgotten:
        pairs = list(learned.forgotten.values())
        before, after = (sum(part) / len(pairs) for part in zip(*pairs, strict=True))
        lines.append(f"watched classes: {percent(before)} -> {percent(after)}")
    size = (model / store.MODEL).stat().st_size / 1e6
    lines.append(
        f"{decode_file_name(str(model))}: {size:.2f} MB, learned in {learned.seconds:.1f} s"
    )
    console = stdout_console()
    for line in lines:
        print_line(console, line)
