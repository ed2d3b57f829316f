"""List the licences of the installed dependencies of coda-prompt, with all its extras or some.

python tools/list_licences.py            # what every installation has
python tools/list_licences.py serve onnx
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata


def licences(extras: Iterable[str]) -> dict[str, str]:
    """Return the licence of each dependency that is installed, by name, also of indirect ones."""
    found: dict[str, str] = {}
    pending = [("coda-prompt", tuple(extras))]
    while pending:
        name, wanted = pending.pop()
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for requirement in package.requires or ():
            dependency = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
            extra = re.search(r"""extra == ['"]([^'"]+)""", requirement)
            if (extra is None or extra[1] in wanted) and dependency not in found:
                found[dependency] = _licence(dependency)
                pending.append((dependency, ()))
    return {name: licence for name, licence in sorted(found.items()) if licence}


def _licence(name: str) -> str:
    """Return the licence that a package states; empty if it is not installed."""
    try:
        fields = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return ""
    for expression in fields.get_all("License-Expression", []):
        return str(expression)
    kinds = [line for line in fields.get_all("Classifier", []) if line.startswith("License ::")]
    stated = "; ".join(line.rpartition(" :: ")[2] for line in kinds)
    texts = [text for text in fields.get_all("License", []) if text]
    return stated or str(*texts[:1] or ["not stated"]).splitlines()[0]


def main() -> None:
    for name, licence in licences(sys.argv[1:]).items():
        print(f"{name} {metadata.version(name)}: {licence}")


if __name__ == "__main__":
    main()
