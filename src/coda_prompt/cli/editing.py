"""Commands that edit what was taught: rename, merge-classes, forget, relabel, undo, merge, ..."""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_prompt import console
from coda_prompt.cli import options
from coda_prompt.cli.completion import complete_class
from coda_prompt.errors import BadOption, CorruptFile, UnknownName, counted, join_names

if TYPE_CHECKING:
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.folder import Version

app = typer.Typer()

ClassName = Annotated[str, typer.Argument(help="Class name.", autocompletion=complete_class)]


@app.command(epilog="Example: `coda rename my-model cat 'house cat'`")
@options.with_options(output=options.output_options)
def rename(
    model: options.Model,
    old: ClassName,
    new: Annotated[str, typer.Argument(help="Its new name.")],
    backbone: options.BackboneFile = None,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Rename a class."""
    with _edited(model, backbone) as classifier:
        classifier.rename(old, new)
    _print_state(model, f"{old} is now {console.class_name(new)}", as_json, output)


@app.command("merge-classes", epilog="Example: `coda merge-classes my-model mug cup --into cup`")
@options.with_options(output=options.output_options)
def merge_classes(
    model: options.Model,
    names: Annotated[
        list[str], typer.Argument(help="Two or more classes.", autocompletion=complete_class)
    ],
    into: Annotated[str, typer.Option(help="Name of the class they become.")],
    backbone: options.BackboneFile = None,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Merge classes into one, as if they had been taught under one name."""
    with _edited(model, backbone) as classifier:
        classifier.merge_classes(names, into)
    _print_state(model, f"{join_names(names)} are now {console.class_name(into)}", as_json, output)


@app.command(epilog="Example: `coda forget my-model 'a person'`")
@options.with_options(output=options.output_options)
def forget(
    model: options.Model,
    name: ClassName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    backbone: options.BackboneFile = None,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Remove a class from a model and all its versions. This cannot be undone."""
    from coda_prompt.learner.folder import ModelFolder

    known, name = ModelFolder(model).description().classes, console.class_name(name)
    if name not in known:
        raise UnknownName("class", name, known, str(model))
    question = f"Remove {name} from {model} and all its versions? This cannot be undone."
    if not yes and not typer.confirm(question, err=True):
        raise typer.Exit(1)
    with _edited(model, backbone, forgets=True) as classifier:
        forgotten = classifier.forget(name)
    if as_json:
        console.print_json(dataclasses.asdict(forgotten))
        return
    _print_state(model, f"{name} ({counted(forgotten.images, 'image')}) is removed", False, output)
    output.message(
        f"{counted(forgotten.versions, 'earlier version')} rewritten; {forgotten.remains}"
    )


@app.command(epilog="Example: `coda relabel my-model corrected/ --from cat`")
@options.with_options(output=options.output_options)
def relabel(
    model: options.Model,
    folder: options.Folder,
    taught_as: Annotated[
        str,
        typer.Option(
            "--from", help="The class they were taught as.", autocompletion=complete_class
        ),
    ],
    backbone: options.BackboneFile = None,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Move images that were taught as the wrong class; FOLDER has them under the right name.

    Whether they were taught cannot be checked: leave out images that were held out (`--val`) or
    never taught.
    """
    with _edited(model, backbone) as classifier:
        counts = classifier.relabel(folder, taught_as=taught_as)
    if as_json:
        console.print_json(counts)
        return
    moved = ", ".join(f"{count} to {name}" for name, count in counts.items())
    _print_state(model, f"moved from {taught_as}: {moved}", False, output)


@app.command(epilog="Examples: `coda undo my-model`; `coda undo my-model --to 3`")
@options.with_options(output=options.output_options)
def undo(
    model: options.Model,
    to: Annotated[
        int | None, typer.Option(min=0, help="Number of a version, see `coda history`.")
    ] = None,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Undo the newest lesson or edit: restores the previous version, bit for bit."""
    from coda_prompt.learner.folder import ModelFolder

    folder = ModelFolder(model)
    with contextlib.suppress(CorruptFile):  # a damaged model can be undone, a missing one cannot
        folder.read()
    with folder.writing() as at_end:
        _print_restored(model, folder.restore(at_end, to), as_json, output)


@app.command(epilog="Example: `coda redo my-model`")
@options.with_options(output=options.output_options)
def redo(
    model: options.Model,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Restore the version that was undone last, bit for bit."""
    from coda_prompt.learner.folder import ModelFolder

    folder = ModelFolder(model)
    folder.read()
    with folder.writing() as at_end:
        _print_restored(model, folder.restore(at_end, redo=True), as_json, output)


@app.command(epilog="Example: `coda history my-model`")
def history(model: options.Model, as_json: options.AsJson = False) -> None:
    """List the lessons with their accuracy and their cost for older classes, edits and versions.

    The cost is known for lessons whose command named images of older classes.
    """
    from coda_prompt.learner import reports
    from coda_prompt.learner.card import share_of
    from coda_prompt.learner.folder import ModelFolder

    folder = ModelFolder(model)
    folder.description()  # raises if there is no model
    found = reports.history(folder.versions(), model)
    if as_json:
        console.print_json(dataclasses.asdict(found))
        return
    rows: list[list[object]] = []
    lessons = 0
    for entry in found.entries:
        lessons, cost = lessons + (entry.kind == "lesson"), ""
        if entry.older_before is not None:
            older = (
                share_of(s, entry.older_images) for s in (entry.older_before, entry.older_after)
            )
            cost = " -> ".join(older)
        what = entry.what or join_names(entry.new, 6)
        shares = [share_of(each, entry.held_out) for each in (entry.accuracy, entry.accuracy_own)]
        numbers = [join_names(entry.continued, 6), entry.images, *shares, cost]
        cells = numbers if entry.kind == "lesson" else [""] * 5
        number = lessons if entry.kind == "lesson" else "edit"
        rows.append([number, entry.date[:10], what, *cells])
    heads = ["lesson", "date", "new classes or edit", "continued", "images", "accuracy"]
    heads += ["among own", "older"]
    console.stdout_console().print(console.table(heads, rows))
    versions = [
        [f"{each.number}{' (current)' if each.current else ''}", each.lessons, each.classes]
        for each in found.versions
    ]
    heads = ["version", "lessons", "classes"]
    console.stdout_console().print(console.table(heads, versions, "Versions: coda undo --to N"))


@app.command(epilog="Examples: `coda diff my-model other-model`; `coda diff my-model@3 my-model`")
def diff(
    first: Annotated[str, typer.Argument(help="Model folder, or FOLDER@N for version N.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    as_json: options.AsJson = False,
) -> None:
    """Show how two models or versions differ: classes, images, settings."""
    from coda_prompt.learner import reports

    found = reports.difference(reports.read_named(first), reports.read_named(second))
    if as_json:
        console.print_json(dataclasses.asdict(found))
        return
    rows: list[list[object]] = []
    rows += [[name, count, "-"] for name, count in found.only_first.items()]
    rows += [[name, "-", count] for name, count in found.only_second.items()]
    rows += [[name, *counts] for name, counts in found.images.items()]
    rows += [[name, *values] for name, values in found.settings.items()]
    names = [console.decode_file_name(name) for name in (first, second)]
    console.stdout_console().print(console.table(["class (images) or setting", *names], rows))
    console.print_result(f"Classes with equally many images in both: {found.same}")


@app.command(epilog="Example: `coda merge model-a model-b --out joined`")
@options.with_options(output=options.output_options)
def merge(
    models: Annotated[list[Path], typer.Argument(help="Two or more model folders.")],
    out: Annotated[Path, typer.Option(help="Folder of the joined model.")],
    count_twice: Annotated[
        bool,
        typer.Option(
            "--count-twice",
            help="Join models that have learned the same images, which then count twice.",
        ),
    ] = False,
    backbone: options.BackboneFile = None,
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Join models that were taught apart, without their images.

    They need the same closed-form method and backbone. Classes of the same name are merged. Models
    that have learned the same images are refused.
    """
    from coda_prompt.learner.classifier import ContinualClassifier
    from coda_prompt.learner.folder import ModelFolder

    if ModelFolder(out).exists:
        raise BadOption("coda merge", "out", f"there is a model in {out} already")
    classifiers = [
        ContinualClassifier.load(each, backbone=backbone, verbose=False) for each in models
    ]
    joined = ContinualClassifier.merge(classifiers, count_twice=count_twice)
    joined.save(out)
    _print_state(out, f"{len(models)} models joined", as_json, output)


def _edited(
    model: Path, backbone: str | None, *, forgets: bool = False
) -> "AbstractContextManager[ContinualClassifier]":
    """Load a model for an edit and write it afterwards; nobody else writes in between."""
    from coda_prompt.learner.classifier import edited
    from coda_prompt.learner.folder import ModelFolder

    return edited(ModelFolder(model), backbone=backbone, forgets=forgets)


def _print_restored(
    model: Path, restored: "Version", as_json: bool, output: console.Output
) -> None:
    description = restored.description
    if as_json:
        _print_version(restored)
        return
    classes, lessons = len(description.classes), len(description.tasks)
    counts = f"{counted(classes, 'class')} in {counted(lessons, 'lesson')}"
    name = console.decode_file_name(str(model))
    output.message(f"{name}: now {counts} (version {restored.number})")


def _print_state(model: Path, what: str, as_json: bool, output: console.Output) -> None:
    """Print an edit and what the model has now."""
    from coda_prompt.learner.folder import ModelFolder

    current = ModelFolder(model).current()
    if as_json:
        _print_version(current)
        return
    classes = counted(len(current.description.classes), "class")
    output.message(f"{console.decode_file_name(str(model))}: {what}; {classes}")


def _print_version(model: "Version") -> None:
    lessons, classes = len(model.description.tasks), model.description.classes
    console.print_json({"version": model.number, "tasks": lessons, "classes": classes})
