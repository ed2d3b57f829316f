"""The `coda` command. Heavy modules are imported when a command runs, so `--help` is fast."""

import atexit
import errno
import gc
import io
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coda_prompt import __version__
from coda_prompt.cli import bench, catalog, editing, learner, predict, serve
from coda_prompt.console import escape_control_characters
from coda_prompt.errors import METHOD_MODULE, CodaError, Interrupted, MissingExtra, WrongFolder

RESEARCH = frozenset({"torch", "lightning_fabric", "matplotlib", "yaml", "onnx", "onnxscript"})
"""Packages of the extra `research`."""


class Commands(TyperGroup):
    """The commands; `--help` shows flags without a type, because they take no value."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_types_of_flags(command.get_params(ctx))
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:  # pydantic, which typer uses, adds what it raised
            error.message = error.message.replace("Value error, ", "")
            raise

    def get_params(self, ctx: Any) -> Any:
        return _hide_types_of_flags(super().get_params(ctx))


def _hide_types_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


app = typer.Typer(
    cls=Commands,
    help="Image classification that keeps learning new classes without storing old images.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for family in (learner, editing, predict, serve, catalog, bench):
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


def _describe(error: OSError) -> str:
    """Return a message for an error of the file system, such as a full disk."""
    path = f"{error.filename}: " if error.filename else ""
    disk_full = "Free disk space and run the same command again; finished work is saved."
    remedies = {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), disk_full),
        errno.EACCES: "Check the permissions of this path.",
        errno.EROFS: "Choose a writable path.",
        errno.EEXIST: "This is a file; name a folder.",
        errno.ENOTDIR: "A part of this path is a file; name a folder.",
    }
    remedy = remedies.get(error.errno or 0, "Check this path.")
    return f"{path}{error.strerror or error}. {remedy}"


def _error_in_method(error: Exception) -> str | None:
    """Return a message for an error in a method of the user's own; None: the error is elsewhere.

    It is in the method if no function of this package ran after the method's last line.
    """
    last = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(METHOD_MODULE):
            last = frame
        elif module.partition(".")[0] == "coda_prompt":
            last = None
    if last is None:
        return None
    where = f"{last.f_code.co_filename}, line {last.f_lineno}, in {last.f_code.co_name}"
    return f"There is an error in your method. {where}: {type(error).__name__}: {error}"


def main() -> None:
    """Run the command line; errors a user can cause end in one message and an exit code."""
    atexit.register(gc.freeze)  # else the exit looks for garbage in all of torch, for 0.3 s
    # Large images are refused with a BadImage error of our own.
    warnings.filterwarnings("ignore", message=".*decompression bomb")
    for output in (sys.stdout, sys.stderr):
        if sys.platform == "win32" and isinstance(output, io.TextIOWrapper):
            output.reconfigure(encoding="utf-8")  # a pipe there has the code page of the system
    try:
        app()
    except CodaError as error:
        message = str(error)
        if isinstance(error, Interrupted):
            message = f"Interrupted. Progress is saved. Resume with: {learner.resume_command()}"
        if isinstance(error, WrongFolder):
            for folder in error.instead:
                message += f"\n  {learner.resume_command({error.folder: folder})}"
        typer.echo(f"coda: {escape_control_characters(message)}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        typer.echo(f"coda: {escape_control_characters(_describe(error))}", err=True)
        sys.exit(CodaError.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in RESEARCH:
            raise
        typer.echo(f"coda: {MissingExtra('This command', 'research')}", err=True)
        sys.exit(CodaError.exit_code)
    except Exception as error:
        message_of_method = _error_in_method(error)
        if message_of_method is None:
            raise
        typer.echo(f"coda: {escape_control_characters(message_of_method)}", err=True)
        sys.exit(CodaError.exit_code)
    except (KeyboardInterrupt, SystemExit) as exit_:
        if isinstance(exit_, SystemExit) and exit_.code != Interrupted.exit_code:
            raise
        typer.echo("coda: Interrupted.", err=True)
        sys.exit(Interrupted.exit_code)
