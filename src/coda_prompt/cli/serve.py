"""The command that starts the HTTP service: serve."""

import contextlib
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from coda_prompt.cli.options import Device, MethodFile
from coda_prompt.console import print_line, stderr_console
from coda_prompt.errors import BadOption, MissingExtra

app = typer.Typer()

SHORTEST_TOKEN = 8
MOST_CALLERS = 500
"""Connections at a time; more are told to come later."""
DEMO = "demo-model"


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
    method: MethodFile = None,
    device: Device = "auto",
) -> None:
    """Answer and learn over HTTP, with a page to draw, teach and see."""
    try:
        import uvicorn

        from coda_prompt.serve.access import LOOPBACK, AccessPolicy
        from coda_prompt.serve.app import make_app
        from coda_prompt.serve.service import Service
    except ModuleNotFoundError as error:
        raise MissingExtra("coda serve", "serve") from error
    inside = host in LOOPBACK
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise BadOption("coda serve", "token", f"take at least {SHORTEST_TOKEN} letters")
    if not inside and token is None:
        problem = f"{host} can be reached by others: set CODA_TOKEN to a secret first"
        raise BadOption("coda serve", "token", problem)
    policy = AccessPolicy(token, LOOPBACK if inside else None)
    with _folder(model) as folder, _listening(host, port) as listener:
        service = make_app(Service(folder, batching=batching, device=device, method=method), policy)
        name = f"[{host}]" if ":" in host else host
        print_line(
            stderr_console(), f"http://{name}:{listener.getsockname()[1]}/  (Ctrl-C ends it)"
        )
        config = uvicorn.Config(
            service,
            log_level="warning",
            timeout_graceful_shutdown=30,
            limit_concurrency=MOST_CALLERS,
        )
        # uvicorn ends by giving itself the signal again, which would leave the demo's copy behind.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def _folder(model: Path | None) -> Iterator[Path]:
    """The model's folder, or a copy of the demo model for as long as the service runs."""
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="coda-demo-") as place:
        folder = Path(place) / DEMO
        with resources.as_file(resources.files("coda_prompt") / "assets" / DEMO) as original:
            shutil.copytree(original, folder)
        print_line(
            stderr_console(),
            f"A copy of the demo model in {folder}; it is gone when the service ends. To keep what "
            "you teach, serve a model of your own: coda serve MODEL",
        )
        yield folder


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()  # who calls between the address being said and the start waits
        except (OSError, OverflowError) as error:
            problem = f"{host}:{port} cannot be listened on ({error})"
            raise BadOption("coda serve", "port", problem) from error
        yield listener
