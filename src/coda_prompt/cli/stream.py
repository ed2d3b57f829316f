"""The command that learns from a growing folder: stream."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from coda_prompt import console
from coda_prompt.cli import options
from coda_prompt.errors import counted, join_names

app = typer.Typer()


@app.command(
    epilog="Examples: `coda stream my-model inbox/`; `coda stream my-model inbox/ --watch`; "
    "`coda stream my-model inbox/ --watch --chunk 50 --idle 60 --json`"
)
@options.with_options(output=options.output_options)
def stream(
    model: options.Model,
    folder: Annotated[
        Path, typer.Argument(help="Folder with one subfolder of images per class; it may grow.")
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Wait for more images, until Ctrl-C.")
    ] = False,
    chunk: Annotated[int, typer.Option(min=1, help="Most images of a lesson.")] = 100,
    idle: Annotated[
        float,
        typer.Option(
            min=0,
            help="Learn an incomplete chunk after this number of seconds without a new image.",
        ),
    ] = 10.0,
    every: options.Every = 0.5,
    backbone: options.Backbone = None,
    method: options.Method = None,
    val: options.Validation = 0.2,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
    *,
    output: console.Output,
) -> None:
    """Learn the images of a folder in chunks, each image once; the model answers after each chunk.

    The same command resumes after an interruption, and learns only images that are new.
    """
    from coda_prompt.data.live import labelled_files
    from coda_prompt.learner import store
    from coda_prompt.learner.arrivals import Arrivals
    from coda_prompt.learner.classifier import load_or_create
    from coda_prompt.learner.feedback import LearnerProgress
    from coda_prompt.shutdown import ShutdownFlag
    from coda_prompt.training.devices import Devices

    stop = ShutdownFlag()
    with store.exclusive_writer(model), stop.handling_signals():
        classifier = load_or_create(model, backbone, method, Devices(device).fabric())
        if watch:
            name = console.decode_file_name(str(folder))
            output.message(f"learning the images of {name} (press Ctrl-C to stop)")
        with LearnerProgress(output.quiet) as progress:
            arrivals = Arrivals(
                classifier, model, folder, chunk, val, stop, on_event=progress.on_event
            )
            lessons = 0
            for learned in arrivals.lessons(watch=watch, idle=idle, poll=every):
                lessons += 1
                if as_json:
                    console.print_json(dataclasses.asdict(learned), line=True)
                    continue
                new, continued = (
                    join_names(names, 6) or "none" for names in (learned.new, learned.continued)
                )
                console.print_result(
                    f"lesson {len(classifier.tasks_)}: "
                    f"{counted(sum(learned.images.values()), 'image')}; "
                    f"new: {new}; continued: {continued}"
                )
        if not lessons and not stop():
            name, images = console.decode_file_name(str(folder)), len(labelled_files(folder))
            output.message(
                f"{name}: no new image; the {counted(images, 'image')} in it were learned, or left "
                "out as unreadable, before"
                if images
                else f"{name}: no image in it; images have to be in one folder for each class"
            )
