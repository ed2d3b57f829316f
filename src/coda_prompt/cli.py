"""The `coda` command: verbs and their options, no logic. Heavy modules load when a verb runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from coda_prompt import __version__
from coda_prompt.errors import CodaError

app = typer.Typer(
    help="Image classification that keeps learning new classes without keeping old images.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

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
    benchmark: Annotated[str, typer.Argument(help="A preset, or the path of a YAML file.")],
    methods: Annotated[
        str, typer.Option(help="Comma-separated names, or `all`; without: the preset's choice.")
    ] = "",
    trials: Annotated[int | None, typer.Option(min=1, help="Seeds 0, 1, … to run.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs"),
    data: Annotated[
        Path | None, typer.Option(envvar="CODA_DATA", help="Folder of the paper's datasets.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="field.field=value; may be repeated.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at a time, each with its share of the threads.")
    ] = 1,
    validation: Annotated[
        bool, typer.Option(help="Test on a fifth of the training images instead.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Print the resolved runs and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a benchmark: methods x trials, task after task, and a table in the end.

    Finished runs are not run again: the same command continues an interrupted benchmark.
    """
    from coda_prompt.bench import command

    overrides = [] if data is None else [f"data={json.dumps(str(data))}"]
    overrides += override or []
    if trials is not None:
        overrides.append(f"trials={trials}")
    if validation:
        overrides.append("stream.validation=true")
    command.bench(benchmark, methods, overrides, out, jobs=jobs, dry_run=dry_run, as_json=as_json)


def main() -> None:
    """Run the command line; an error a user can cause ends in one message and its exit code."""
    try:
        app()
    except CodaError as error:
        typer.echo(f"coda: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("coda: interrupted", err=True)
        sys.exit(130)
