"""The `coda` command: verbs and their options, no logic. Heavy modules load when a verb runs."""

from __future__ import annotations

import errno
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from coda_prompt import __version__
from coda_prompt.console import visible
from coda_prompt.errors import BadOption, CodaError, Interrupted

if TYPE_CHECKING:
    from coda_prompt.bench.config import Override
    from coda_prompt.bench.ray_cluster import Cluster
    from coda_prompt.training.devices import Devices

app = typer.Typer(
    help="Image classification that keeps learning new classes without keeping old images.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Model = Annotated[Path, typer.Argument(help="The model's folder.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
SkipBad = Annotated[bool, typer.Option(help="Go on without unreadable files.")]
Methods = Annotated[
    str | None, typer.Option(help="Comma-separated names, or `all`; without: its own.")
]
Out = Annotated[
    str, typer.Option(help="Folder of the run folders, or an address of one (`s3://…`).")
]
Data = Annotated[
    Path | None, typer.Option(envvar="CODA_DATA", help="Folder of the paper's datasets.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="field.field=value; may be repeated.")]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at a time, each with a share of the threads.")]
DeviceCount = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        help="Devices of each machine that share one training; on a CPU, "
        "processes. Without: those torchrun or Slurm started, or one.",
    ),
]
Nodes = Annotated[
    int | None, typer.Option(min=1, help="Machines that share one training, each started alike.")
]
StrategyName = Literal["auto", "ddp", "fsdp"]
Strategy = Annotated[
    StrategyName,
    typer.Option(help="ddp: each device has the backbone; fsdp: each has a part of it."),
]
PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "16-mixed"]
Precision = Annotated[
    PrecisionName | None,
    typer.Option(help="Of the arithmetic; without: 32-true or the preset's."),
]
Executor = Annotated[
    Literal["local", "ray"], typer.Option(help="Where runs go: this machine, or a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(help="Of a running Ray cluster; without: one of this machine alone is started."),
]
Cpus = Annotated[
    float | None, typer.Option(min=0.1, help="Of each run on a Ray cluster; without: 1.")
]
Gpus = Annotated[
    float | None,
    typer.Option(min=0, help="Of each run on a Ray cluster; 0.5: half a GPU; without: none."),
]
Keep = Annotated[bool, typer.Option(help="Leave what was learned in the run folders, too.")]
QueryMode = Literal["exact", "cached"]
Queries = Annotated[
    Literal["exact", "cached", "one-stage"] | None,
    typer.Option(
        help="Of each view, of the plain image once, or from the prompted pass's first blocks; "
        "without: the preset's."
    ),
]
Views = Annotated[
    int | None, typer.Option(min=1, help="Augmented views an image has; without: ever new ones.")
]
TensorBoard = Annotated[bool, typer.Option(help="Write TensorBoard files to the run folders, too.")]
DryRun = Annotated[bool, typer.Option(help="Print the resolved runs and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coda-prompt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: `coda backbones --json`")
def backbones(as_json: AsJson = False) -> None:
    """List the backbones that can be named; a path of a .safetensors file works too."""
    from coda_prompt.model.catalog import CATALOG

    if as_json:
        rows = [
            {"name": entry.name, "repository": entry.repository, "description": entry.description}
            for entry in CATALOG.values()
        ]
        typer.echo(json.dumps({"rows": rows}, indent=2))
        return
    table = Table("name", "weights", "description")
    for entry in CATALOG.values():
        table.add_row(entry.name, entry.repository or "in this package", entry.description)
    Console().print(table)


@app.command(epilog="Example: `coda methods coda-p`")
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, or path/to/file.py:Class: show its options.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or the options of one."""
    from coda_prompt.methods import METHODS, describe

    chosen = [name] if name else list(METHODS)
    descriptions = [describe(each) for each in chosen]
    if as_json:
        typer.echo(json.dumps({"rows": descriptions}, indent=2))
        return
    if name:
        table = Table("option", "default", "meaning", title=f"{name}: {descriptions[0]['summary']}")
        for option in descriptions[0]["options"]:
            table.add_row(option["name"], str(option["default"]), option["meaning"])
    else:
        table = Table("method", "what it is")
        for description in descriptions:
            table.add_row(description["name"], description["summary"])
    Console().print(table)


@app.command(
    epilog="Examples: `coda bench pocket`; "
    "`coda bench pocket --methods coda-p,ncm --trials 1 --json`; "
    "`coda bench pocket --set training.epochs=2 --set methods.coda-p.options.length=4`; "
    "`coda bench imagenet-r-10 --data DIR --set protocol=release-2023`"
)
def bench(
    benchmark: Annotated[
        str,
        typer.Argument(help="A preset, a YAML file, or the benchmark.json a run left behind."),
    ],
    methods: Methods = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Seeds 0, 1, … to run.")] = None,
    out: Out = "runs",
    data: Data = None,
    override: Set = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    devices: DeviceCount = None,
    nodes: Nodes = None,
    strategy: Strategy = "auto",
    precision: Precision = None,
    executor: Executor = "local",
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    validation: Annotated[
        bool, typer.Option(help="Test on a fifth of the training images instead.")
    ] = False,
    queries: Queries = None,
    views: Views = None,
    tensorboard: TensorBoard = False,
    keep: Keep = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark: methods x trials, task after task, and a table in the end.

    Finished runs are not run again: the same command continues an interrupted benchmark.
    """
    from coda_prompt.cli import bench as command

    overrides = _overrides(data, override, trials, precision)
    if validation:
        overrides.append((("stream", "validation"), True))
    if views is not None:
        overrides.append((("training", "views"), views))
    if queries == "one-stage":
        overrides.append((("one_stage",), True))
    elif queries is not None:
        overrides.append((("training", "queries"), queries))
    manner = command.RunOptions(
        out, jobs, _devices(device, devices, nodes, strategy),
        _cluster(executor, address, cpus, gpus), tensorboard, keep, dry_run, as_json,
    )  # fmt: skip
    command.bench(benchmark, methods, overrides, manner)


@app.command(
    epilog="Examples: `coda sweep components pocket --jobs 2`; `coda sweep length --data DIR`; "
    "`coda sweep tuning --data DIR --methods coda-p`; "
    "`coda sweep training.learning_rate pocket --methods ft,ft++ --values 1e-4,1e-3,1e-2`"
)
def sweep(
    what: Annotated[
        str,
        typer.Argument(
            help="`components`, `length`, `tuning`, a YAML file, or a field with --values: "
            "`options.…` and `training.…` are the methods' own, others the benchmark's."
        ),
    ],
    benchmark: Annotated[
        str | None, typer.Argument(help="A preset or a YAML file; without: the sweep's own.")
    ] = None,
    methods: Methods = None,
    values: Annotated[str, typer.Option(help="Comma-separated; for a field, or instead.")] = "",
    trials: Annotated[int | None, typer.Option(min=1, help="Seeds 0, 1, … to run.")] = None,
    out: Out = "runs",
    data: Data = None,
    override: Set = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    devices: DeviceCount = None,
    nodes: Nodes = None,
    strategy: Strategy = "auto",
    precision: Precision = None,
    executor: Executor = "local",
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    tensorboard: TensorBoard = False,
    keep: Keep = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark with one field at several values, and draw accuracy against them.

    The sweeps that come with the package test on validation data.
    """
    from coda_prompt.cli import bench as command

    manner = command.RunOptions(
        out, jobs, _devices(device, devices, nodes, strategy),
        _cluster(executor, address, cpus, gpus), tensorboard, keep, dry_run, as_json,
    )  # fmt: skip
    overrides = _overrides(data, override, trials, precision)
    command.sweep(what, benchmark, methods or "", values, overrides, manner)


@app.command(epilog="Example: `coda report runs -o report`")
def report(
    runs: Annotated[
        str, typer.Argument(help="Folder of run folders, at any depth, or the address of one.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")] = Path("report"),
    as_json: AsJson = False,
) -> None:
    """Tables and pictures of finished runs: terminal, Markdown, CSV, LaTeX, and one HTML page."""
    from coda_prompt.cli import bench as command

    command.write_report(runs, out, as_json=as_json)


@app.command(
    epilog="Examples: `coda shards photos/ shards/`, then `coda learn my-model shards:shards/`; "
    "`coda shards hub:owner/name s3://bucket/shards`, then `--set source=shards:s3://bucket/shards`"
)
def shards(
    data: Annotated[
        str,
        typer.Argument(
            help="Class folders (with train/ and test/, or a fifth is set apart), or "
            "`hub:owner/name`."
        ),
    ],
    out: Annotated[str, typer.Argument(help="Folder or address to write the shards to.")],
    megabytes: Annotated[int, typer.Option(min=1, help="Of images in a shard, at most.")] = 256,
) -> None:
    """Pack images into tar shards, which can be read from afar, too.

    A dataset of the hub is read as it comes and not kept on the disk. After a stop the same command
    goes on.
    """
    from coda_prompt.data.packing import pack

    if out.startswith("memory://"):
        raise BadOption("coda shards", "out", "memory ends with the command; name another place")
    written, images = pack(data, out, megabytes)
    typer.echo(f"{out}: {written} shards of {images} images", err=True)


@app.command(
    epilog="Examples: `coda learn my-model photos/`; "
    "`coda learn my-model more-photos/ --watch photos-kept-aside/`; "
    "`coda learn my-model photos/ --backbone vit-b16-in21k --method coda-p --epochs 10`"
)
def learn(
    model: Model,
    folder: Annotated[
        str,
        typer.Argument(
            help="A folder with one folder of images per class, `hub:owner/name`, or `shards:` and "
            "the path or address of tar files."
        ),
    ],
    backbone: Annotated[
        str | None, typer.Option(help="For a new model; see `coda backbones`.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="For a new model; see `coda methods`.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images.")] = None,
    queries: Annotated[
        QueryMode | None, typer.Option(help="Of each view of an image, or of the plain image once.")
    ] = None,
    val: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of each class held out to measure.")
    ] = 0.2,
    watch: Annotated[
        Path | None, typer.Option(help="Images of old classes: what is forgotten is told.")
    ] = None,
    device: Device = "auto",
    devices: DeviceCount = None,
    nodes: Nodes = None,
    strategy: Strategy = "auto",
    precision: Precision = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Learn classes from a folder; the model is made if it does not exist.

    Folders named like known classes continue these. No image is kept.
    """
    from coda_prompt.cli import learner as command

    command.learn(
        model, folder, backbone=backbone, method=method,
        devices=_devices(device, devices, nodes, strategy, precision),
        epochs=epochs, queries=queries, validation=val, watch=watch, skip_bad=skip_bad,
        as_json=as_json,
    )  # fmt: skip


@app.command(
    epilog="Examples: `coda predict my-model image.png`; `coda predict my-model photos/ --json`; "
    "`find . -name '*.jpg' | coda predict my-model - --csv`; "
    "`coda predict my-model *.png --top 3 --unknown-below 0.5`"
)
def predict(
    model: Model,
    images: Annotated[
        list[str],
        typer.Argument(help="Files, folders, patterns; - reads paths from standard input."),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    unknown_below: Annotated[
        float, typer.Option(min=0, max=1, help="Less sure than this: the class is `unknown`.")
    ] = 0.0,
    device: Device = "auto",
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on standard output.")] = False,
) -> None:
    """Name the class of images."""
    from coda_prompt.cli import learner as command

    command.predict(
        model, images, top=top, unknown_below=unknown_below, device=device, skip_bad=skip_bad,
        as_json=as_json, as_csv=as_csv,
    )  # fmt: skip


@app.command(epilog="Example: `coda evaluate my-model test-photos/`")
def evaluate(
    model: Model,
    folder: Annotated[str, typer.Argument(help="A folder with one folder of images per class.")],
    device: Device = "auto",
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model: over all, each class, and what each task kept."""
    from coda_prompt.cli import learner as command

    command.evaluate(model, folder, device=device, skip_bad=skip_bad, as_json=as_json)


@app.command(epilog="Example: `coda info my-model`")
def info(model: Model, as_json: AsJson = False) -> None:
    """What a model has learned, when, and how large it is."""
    from coda_prompt.cli import learner as command

    command.info(model, as_json=as_json)


@app.command(epilog="Example: `coda undo my-model`")
def undo(model: Model) -> None:
    """Take back the newest task: the model is, bit for bit, what it was before."""
    from coda_prompt.cli import learner as command

    command.undo(model)


@app.command(epilog="Example: `coda export my-model model.onnx`")
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The .onnx file to write.")],
) -> None:
    """Write a model with its backbone as one ONNX graph that runs without torch."""
    from coda_prompt.cli import learner as command

    command.export(model, out)


@app.command(
    epilog="Examples: `coda serve`; `coda serve my-model --port 9000`; "
    "`CODA_TOKEN=secret coda serve my-model --host 0.0.0.0`"
)
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="The model's folder; without: a copy of the demo model.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="CODA_TOKEN", help="What callers have to show.")
    ] = None,
    batching: Annotated[bool, typer.Option(help="Gather concurrent requests.")] = True,
    device: Device = "auto",
) -> None:
    """Answer and learn over HTTP, with a page to draw, teach and see."""
    from coda_prompt.cli import serve as command

    command.serve(model, host=host, port=port, token=token, batching=batching, device=device)


def _overrides(
    data: Path | None, override: list[str] | None, trials: int | None, precision: str | None
) -> list[Override]:
    overrides: list[Override] = [] if data is None else [(("data",), str(data))]
    overrides += override or []
    given = {"trials": trials, "precision": precision}
    return overrides + [((field,), value) for field, value in given.items() if value is not None]


def _devices(
    device: str,
    devices: int | None,
    nodes: int | None,
    strategy: StrategyName,
    precision: PrecisionName | None = None,
) -> Devices:
    from coda_prompt.training.devices import Devices

    return Devices(device, devices, nodes, strategy, precision or "32-true")


def _cluster(
    executor: str, address: str | None, cpus: float | None, gpus: float | None
) -> Cluster | None:
    from coda_prompt.bench.ray_cluster import Cluster

    given: dict[str, Any] = {"address": address, "cpus": cpus, "gpus": gpus}
    asked = {field: value for field, value in given.items() if value is not None}
    if executor == "ray":
        return Cluster(**asked)
    if asked:
        problem = "it is of a Ray cluster; add --executor ray"
        raise BadOption("coda bench", next(iter(asked)), problem)
    return None


def _about(error: OSError) -> str:
    """What the system refused: a full disk, a missing permission."""
    where = f"{error.filename}: " if error.filename else ""
    space = "Free some space and run the same command again; nothing finished is lost."
    remedy = {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), space),
        errno.EACCES: "Check the permissions of this place.",
        errno.EROFS: "Choose a place that can be written to.",
    }
    return f"{where}{error.strerror or error}. {remedy.get(error.errno or 0, 'Check this place.')}"


def main() -> None:
    """Run the command line; an error a user can cause ends in one message and its exit code."""
    # Images beyond a limit of ours are refused in our own words.
    warnings.filterwarnings("ignore", message=".*decompression bomb")
    try:
        app()
    except CodaError as error:
        typer.echo(f"coda: {visible(str(error))}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        typer.echo(f"coda: {visible(_about(error))}", err=True)
        sys.exit(CodaError.exit_code)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != Interrupted.exit_code:
            raise
        typer.echo("coda: Interrupted.", err=True)
        sys.exit(Interrupted.exit_code)
