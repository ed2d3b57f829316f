"""Collect the finished runs of a benchmark in one file, to be committed before a machine is gone.

    python tools/collect_results.py runs/NAME docs/lab/results/NAME.json --commit 472d993

Of each run: its configuration, the accuracy matrix and the other results, the environment, and the
sha256 of its `result.json`. Runs that are in the file and no longer in the folder stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from coda_prompt.storage.files import write_atomically


def collect(folder: Path, commit: str) -> dict[str, dict[str, object]]:
    """Return the finished runs of a folder by their path in it."""
    runs: dict[str, dict[str, object]] = {}
    for result in sorted(folder.rglob("result.json")):
        run = result.parent
        runs[run.relative_to(folder).as_posix()] = {
            "commit": commit,
            "sha256": hashlib.sha256(result.read_bytes()).hexdigest(),
            **{
                name: json.loads((run / f"{name}.json").read_text())
                for name in ("config", "environment", "result")
            },
        }
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--commit", required=True, help="Commit that made the runs.")
    options = parser.parse_args()
    earlier = json.loads(options.file.read_text()) if options.file.exists() else {}
    found = collect(options.folder, options.commit)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.file, (json.dumps({**earlier, **found}) + "\n").encode())
    print(f"{options.file}: {len(found)} runs of {options.folder}, {len(earlier)} before")


if __name__ == "__main__":
    main()
