"""Encoders by name: what they are for, and where they come from."""

from __future__ import annotations

from types import MappingProxyType

BUILT_IN = MappingProxyType(
    {
        "photo": ("photo-vit", "photo-lite"),
        "photo-vit": ("photo-vit",),
        "photo-lite": ("photo-lite",),
        "pocket": ("pocket",),
    }
)
"""Encoders in this package -> the networks they see an image with."""
