"""Random generators keyed by seed and purpose.

A generator is derived from a seed and a key such as a task number, so its state never has to be
stored: a resumed run, a worker or another process derives the same generator again.
"""

from __future__ import annotations

import hashlib

import numpy as np


def keyed_generator(seed: int, *key: int | str) -> np.random.Generator:
    """Return a generator whose seed is derived from a seed and a key (SHA-256)."""
    text = "/".join(str(part) for part in (seed, *key))
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
