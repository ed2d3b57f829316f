"""The `coda` command. Heavy modules are imported when a command runs, so `--help` is fast."""

import errno
import sys
import warnings
from typing import Annotated

import typer

from coda_prompt import __version__
from coda_prompt.cli import bench, catalog, data, learner, serve
from coda_prompt.console import escape_control_characters
from coda_prompt.errors import CodaError, Interrupted

app = typer.Typer(
    help="Image classification that keeps learning new classes without storing old images.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for family in (learner, serve, catalog, data, bench):
    app.add_typer(family.app)


def _print_version(requested: bool) -> None:
    if requested:
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
        typer.echo(f"coda: {escape_control_characters(str(error))}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        typer.echo(f"coda: {escape_control_characters(_about(error))}", err=True)
        sys.exit(CodaError.exit_code)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != Interrupted.exit_code:
            raise
        typer.echo("coda: Interrupted.", err=True)
        sys.exit(Interrupted.exit_code)
