"""Write the graphs of the ViTs in this package: src/coda_prompt/assets/NAME.onnx, .json, .weights.

python tools/make_encoders.py [NAME ...]    (two minutes)
"""

from __future__ import annotations

import sys
from pathlib import Path

from coda_prompt.research.export import export_encoder
from coda_prompt.research.vit.catalog import load_backbone

ASSETS = Path(__file__).parents[1] / "src" / "coda_prompt" / "assets"
LICENCES = {
    "pocket": "trained on The Quick, Draw! Dataset (Google, CC BY 4.0)",
    "photo-vit": "MIT and Apache-2.0; ImageNet: non-commercial research and education",
}


def main(names: list[str]) -> None:
    for name in names or list(LICENCES):
        backbone = load_backbone("photo" if name == "photo-vit" else name)
        source = f"{name.removesuffix('-vit')}-vit.safetensors, sha256 {backbone.sha256}"
        description = export_encoder(
            *(backbone.vit, backbone.preprocessing, ASSETS, name),
            name=name,
            licence=LICENCES[name],
            source=source,
        )
        print(f"{name}: {description.fingerprint}")


if __name__ == "__main__":
    main(sys.argv[1:])
