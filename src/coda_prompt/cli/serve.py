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

from coda_prompt.cli.options import AsJson, BackboneFile
from coda_prompt.console import print_json, print_message
from coda_prompt.errors import BadOption, MissingExtra

app = typer.Typer()

DEMO_MODEL = "demo-model"
PHOTO_BACKBONE = "photo"
DRAWINGS, PHOTOGRAPHS = "drawings", "photographs"
"""Names of the models that are served without a model folder."""


@app.command(
    epilog="Examples: `coda serve`; `coda serve my-model --port 9000`; "
    "`CODA_TOKEN=secret coda serve my-model --host 0.0.0.0`"
)
def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Model folder. Default: temporary models for drawings and for photographs."
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Addresses other machines can reach need a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="CODA_TOKEN", help="Token that clients must send.")
    ] = None,
    batching: Annotated[bool, typer.Option(help="Batch concurrent requests.")] = True,
    backbone: BackboneFile = None,
    as_json: AsJson = False,
) -> None:
    """Serve a model over HTTP: predict, learn, and a web page to show and teach."""
    try:
        from coda_prompt.serve.access import AccessPolicy
        from coda_prompt.serve.server import Server
        from coda_prompt.serve.service import Service
    except ModuleNotFoundError as error:
        raise MissingExtra("coda serve", "serve") from error
    policy = AccessPolicy.of(host, token)
    with _model_folders(model, backbone) as folders, _listen(host, port) as listener:
        services = {
            name: Service(
                folder,
                batching=batching,
                temporary=model is None,
                backbone=None if name == DRAWINGS and model is None else backbone,
            )
            for name, folder in folders.items()
        }
        url_host = f"[{host}]" if ":" in host else host
        url = f"http://{url_host}:{listener.getsockname()[1]}/"

        def announce() -> None:
            if as_json:
                print_json({"url": url}, line=True)
            else:
                print_message(f"{url}  (press Ctrl-C to stop)")

        # uvicorn raises the signal again after shutdown; exit normally to delete the demo copy.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, lambda *_: sys.exit(0))
        Server(services, policy, announce).run(sockets=[listener])


@contextlib.contextmanager
def _model_folders(model: Path | None, backbone: str | None) -> Iterator[dict[str, Path]]:
    """Yield the model folder by its name, or temporary models to start from.

    Args:
        model: The model folder.
        backbone: Without a model folder: the backbone of the temporary model for photographs.
    """
    from coda_prompt.learner.classifier import ContinualClassifier

    if model is not None:
        yield {model.resolve().name: model}
        return
    with tempfile.TemporaryDirectory(prefix="coda-demo-") as temporary:
        folders = {name: Path(temporary) / name for name in (DRAWINGS, PHOTOGRAPHS)}
        with resources.as_file(resources.files("coda_prompt") / "assets" / DEMO_MODEL) as original:
            shutil.copytree(original, folders[DRAWINGS])
        ContinualClassifier(backbone or PHOTO_BACKBONE, verbose=False).save(folders[PHOTOGRAPHS])
        print_message(
            f"Serving temporary models for drawings and for photographs in {temporary}, which is "
            "deleted at the end. To save what you teach, serve a model of your own: "
            "coda serve MODEL"
        )
        yield folders


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except (OSError, OverflowError) as error:
            problem = f"cannot listen on {host}:{port} ({error})"
            raise BadOption("coda serve", "port", problem) from error
        yield listener
