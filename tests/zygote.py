"""A process that imports everything once and runs each command in a fork of itself.

Importing torch and Fabric takes seconds, which every command would pay again. small.py starts this
process and sends it one JSON line per command.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import traceback
from typing import Any


def run(request: dict[str, Any]) -> int:
    """In the fork: run the command as a new process would and return its exit code."""
    os.chdir(request["cwd"])
    for number, path in enumerate(request["files"]):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY
        os.dup2(os.open(path, flags), number)
    sys.argv = ["coda", *request["arguments"]]
    code: Any = 0
    try:
        main()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException:  # noqa: BLE001 (like the interpreter)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(request))
        answers.write(f"{child}\n")
        answers.flush()
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


if __name__ == "__main__":
    from coda_prompt.cli import main

    for name in ("bench.html", "bench.launcher", "bench.sweep", "learner.classifier"):
        importlib.import_module(f"coda_prompt.{name}")
    serve()
