"""Whether products in bfloat16 work on this processor and are faster: one is timed.

Instructions for bfloat16 tell neither: some virtual machines report AMX and end the process with an
illegal instruction (https://github.com/uxlfoundation/oneDNN/issues/5689), and some processors have
instructions that are slower than those for float32. A child process tries it, and the answer is
kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

import torch

from coda_prompt.storage.files import user_cache_dir, write_atomically

Answer = Literal["faster", "slower", "fails"]
KNOWN = "bfloat16.json"
"""File in the user's cache with the answers of the machines that use it."""
TIMEOUT = 60
TIMED = """
import time, torch
torch.set_num_threads(1)
def seconds(dtype):
    inputs, weight = torch.ones(512, 768, dtype=dtype), torch.ones(768, 768, dtype=dtype)
    started = time.perf_counter()
    torch.nn.functional.linear(inputs, weight)
    return time.perf_counter() - started
pairs = [(seconds(torch.bfloat16), seconds(torch.float32)) for _ in range(12)]
half, full = (min(times) for times in zip(*pairs))
print("faster" if half < 0.8 * full else "slower")
"""
"""Times products of the size of a ViT's. Other work on the machine delays single ones."""


@functools.cache
def bfloat16_products() -> Answer:
    """Return how products in bfloat16 do on this processor, measured once for the machine."""
    try:
        path = user_cache_dir() / KNOWN
    except RuntimeError:  # there is no home folder
        return _time_products() or "slower"
    machine, known = _machine(), _read(path)
    if machine in known:
        return known[machine]
    answer = _time_products()
    if answer is None:
        return "slower"
    # A folder that cannot be written to: the next process measures again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**known, machine: answer}, indent=1)
        write_atomically(path, content.encode())
    return answer


def _time_products() -> Answer | None:
    """Time products in a child process, which may end with an illegal instruction.

    Returns:
        None if there was no answer within a minute.
    """
    command = [sys.executable, "-c", TIMED]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if child.returncode:
        return "fails"
    return "faster" if child.stdout.strip() == "faster" else "slower"


def _machine() -> str:
    """Return a hash of what the answer depends on: the processor and the version of torch."""
    info, lines = Path("/proc/cpuinfo"), [platform.machine(), platform.processor()]
    if info.exists():
        processor = info.read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
        kept = ("model name", "flags", "CPU part", "Features")
        lines += [line for line in processor if line.startswith(kept)]
    return hashlib.sha256("\n".join([torch.__version__, *lines]).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Answer]:
    """Return the answers in a file; none if it is missing or damaged."""
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    answers = known.items() if isinstance(known, dict) else ()
    return {machine: answer for machine, answer in answers if answer in get_args(Answer)}
