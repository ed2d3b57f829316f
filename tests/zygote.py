"""A process that has imported everything once, and runs each command in a fork of itself.

Importing torch and Fabric takes seconds, which every command would pay for again; all else is the
same. It is asked over pipes, a line of JSON each; small.py starts it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import traceback
from typing import Any


def run(asked: dict[str, Any]) -> int:
    """In the fork: the command as if it had been started."""
    os.chdir(asked["cwd"])
    for number, path in enumerate(asked["files"]):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY
        os.dup2(os.open(path, flags), number)
    sys.argv = ["coda", *asked["arguments"]]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 (as the interpreter would)
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def serve() -> None:
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    for line in requests:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run(asked))
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
