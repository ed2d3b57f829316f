"""A process that imports everything once and runs each program in a fork of itself.

Importing torch, Fabric and matplotlib takes seconds, which every command would pay again. forked.py
starts this process and sends it one JSON line per program.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
from typing import Any, TextIO

MODULES = (
    *(
        f"coda_prompt.{name}"
        for name in (
            "cli",
            "research.bench.html",
            "research.bench.launcher",
            "research.bench.sweep",
        )
    ),
    *(
        f"coda_prompt.{name}"
        for name in ("learner.classifier", "serve.app", "research.training.devices")
    ),
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "uvicorn"),
)


def run(request: dict[str, Any]) -> int:
    """In the fork: run the program as a new process would and return its exit code."""
    code: Any = 0
    try:
        exec(compile(request["program"], "<program>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:  # noqa: BLE001 (like the interpreter)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def prepare(request: dict[str, Any]) -> None:
    """In the fork: what differs between processes."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    for number, path in enumerate(request["files"]):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["coda", *request["arguments"]]
    main = types.ModuleType("__main__")
    main.__spec__ = importlib.util.find_spec("coda_prompt.__main__")  # as `python -m coda_prompt`
    sys.modules["__main__"] = main


def supervise(request: dict[str, Any], answers: TextIO) -> None:
    """Fork the program, answer with its process id, and write its exit code to a file."""
    child = os.fork()
    if child == 0:
        answers.close()
        prepare(request)
        os._exit(run(request))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers.write(f"{child}\n")
    answers.close()
    _, status = os.waitpid(child, 0)
    with open(request["exit_code"] + ".tmp", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
    os.replace(file.name, request["exit_code"])


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    for line in requests:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            supervise(json.loads(line), answers)
            os._exit(0)


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    serve()
