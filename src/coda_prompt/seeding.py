"""Random generators keyed by what they are for.

A stream of numbers is named by a seed and a key such as a task's number. Nothing has to be stored
or replayed: a run that resumes, a worker or another process makes the same generator again.
"""

from __future__ import annotations

import hashlib

import torch


def keyed_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed for this key."""
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """A CPU generator for this key."""
    return torch.Generator().manual_seed(keyed_seed(seed, *key))
