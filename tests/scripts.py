"""Import scripts of tools/ in tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def tool(name: str) -> Any:
    """Import a script of tools/ by its name, with the scripts it imports itself."""
    if str(ROOT / "tools") not in sys.path:
        sys.path.append(str(ROOT / "tools"))
    return importlib.import_module(name)
