"""Write the graphs of the ViTs in this package: src/coda_prompt/assets/NAME.onnx, .json, .weights.

python tools/make_encoders.py [NAME ...]    (or: make encoders)
"""

from __future__ import annotations

import sys
from pathlib import Path

from coda_prompt.encoder.catalog import CATALOG
from coda_prompt.research.export import export_encoder
from coda_prompt.research.vit.catalog import load_backbone

ASSETS = Path(__file__).parents[1] / "src" / "coda_prompt" / "assets"


def main(names: list[str]) -> None:
    for name in names or ["pocket", "photo-vit"]:
        backbone = load_backbone(name)
        description = export_encoder(
            *(backbone.vit, backbone.preprocessing, ASSETS, name),
            name=name,
            licence=CATALOG[name].licence,
            source=f"{CATALOG[name].file}, sha256 {backbone.sha256}",
        )
        print(f"{name}: {description.fingerprint}")


if __name__ == "__main__":
    main(sys.argv[1:])
