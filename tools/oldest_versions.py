"""Print the oldest version of each dependency that pyproject.toml allows, as constraints for pip.

python tools/oldest_versions.py > oldest.txt
pip install --constraint oldest.txt .
"""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def oldest_versions(text: str) -> dict[str, str]:
    """Return the lower bound of every requirement that has one; Python 3.10 has no TOML reader."""
    found = re.findall(r'"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9][^",;]*)"', text)
    return {name: version for name, version in found if name not in ("hatchling",)}


def main() -> None:
    runtime = PROJECT.read_text("utf-8").partition("\ndocs = ")[0]
    for name, version in oldest_versions(runtime).items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
