"""Random generators keyed by seed and purpose.

A generator is derived from a seed and a key such as a task number, so its state never has to be
stored: a resumed run, a worker or another process derives the same generator again.
"""

from __future__ import annotations

import hashlib

import torch


def keyed_seed(seed: int, *key: int | str) -> int:
    """Derive a 63-bit seed from a seed and a key (SHA-256)."""
    text = "/".join(str(part) for part in (seed, *key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """Return a CPU generator for a seed and a key."""
    return torch.Generator().manual_seed(keyed_seed(seed, *key))
