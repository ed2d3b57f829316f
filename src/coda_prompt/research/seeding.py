"""Random generators keyed by seed and purpose.

A generator is derived from a seed and a key such as a task number, so its state never has to be
stored: a resumed run, a worker or another process derives the same generator again.
"""

from __future__ import annotations

import hashlib

import torch


def keyed_generator(seed: int, *key: int | str) -> torch.Generator:
    """Return a CPU generator whose 63-bit seed is derived from a seed and a key (SHA-256)."""
    text = "/".join(str(part) for part in (seed, *key))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
