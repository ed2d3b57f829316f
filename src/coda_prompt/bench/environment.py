"""Where a run took place: versions, hashes, the machine and its memory."""

from __future__ import annotations

import contextlib
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from coda_prompt import __version__
from coda_prompt.data.sources import Source
from coda_prompt.model.catalog import LoadedBackbone


def hashes(surroundings: dict[str, Any]) -> dict[str, str]:
    return {name: surroundings[name]["sha256"] for name in ("data", "backbone")}


def environment(backbone: LoadedBackbone, source: Source, fabric: Fabric) -> dict[str, Any]:
    """What else the numbers may depend on."""
    packages = ("torch", "lightning-fabric", "numpy", "pillow", "safetensors")
    return {
        "coda_prompt": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "machine": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "device": fabric.device.type,
        "processes": fabric.world_size,
        "backbone": {
            "name": backbone.name,
            "sha256": backbone.sha256,
            "revision": backbone.revision,
        },
        "data": {"name": source.name, "sha256": source.fingerprint(), "notes": source.notes},
    }


class PeakMemory:
    """The most this process has held since this was made: on the device, or else of the host."""

    STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):
            self.RESET.write_text("5")  # Linux: the high-water mark starts anew

    def peak(self) -> int:
        """In bytes. Where the mark cannot start anew it is that of the process's whole life."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(OSError):
            for line in self.STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _commit() -> str | None:
    """Of the checkout this package runs from, if it is one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    described = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        for command in (tracked, described):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if done.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
