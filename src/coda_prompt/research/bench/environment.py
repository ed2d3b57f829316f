"""The environment of a run: versions, input hashes, machine and peak memory."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from coda_prompt import __version__
from coda_prompt.images.sources import Source
from coda_prompt.research.vit.catalog import LoadedBackbone


def input_hashes(environment: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of a run's data and backbone."""
    return {name: environment[name]["sha256"] for name in ("data", "backbone")}


def describe_environment(
    backbone: LoadedBackbone, source: Source, fabric: Fabric
) -> dict[str, Any]:
    """Describe everything outside the configuration that the numbers may depend on."""
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
        "backbone": {name: getattr(backbone, name) for name in ("name", "sha256", "revision")},
        "data": {"name": source.name, "sha256": source.fingerprint(), "notes": source.notes},
    }


class PeakMemory:
    """Peak memory of this process since creation: of the GPU if there is one, else of the host."""

    STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):
            self.RESET.write_text("5")  # Linux: reset the high-water mark

    def peak(self) -> int:
        """Return bytes; where the mark cannot be reset, those since the process started."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(OSError):
            for line in self.STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return _peak_of_process()


def _peak_of_process() -> int:
    """Return the most bytes this process ever used; 0 where the system does not say (Windows)."""
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _commit() -> str | None:
    """Return the git commit of the checkout this package runs from, if it is one."""
    git = ["git", "-C", str(Path(__file__).parent)]
    tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        for command in (tracked, describe):
            finished = subprocess.run(command, capture_output=True, text=True, timeout=10)
            if finished.returncode:
                return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.strip() or None
