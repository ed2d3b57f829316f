# %% [markdown]
# # Export and run without torch
#
# `export_onnx` (or `coda export`) writes one ONNX graph from pixels to calibrated probabilities. Its metadata contains
# the class names and the preprocessing, so onnxruntime, NumPy and Pillow are enough to run it.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

from sketches import write_sketches

from coda_prompt import ContinualClassifier

work = Path(tempfile.mkdtemp())
data = write_sketches(work / "data", ["anvil", "fish", "cow"])
classifier = ContinualClassifier("pocket", verbose=False)
classifier.learn(data / "train")
classifier.export_onnx(work / "model.onnx")
print(f"{(work / 'model.onnx').stat().st_size / 1e6:.1f} MB")

# %%
program = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1])
metadata = session.get_modelmeta().custom_metadata_map
classes, pixels = json.loads(metadata["classes"]), json.loads(metadata["pixels"])
for path in sys.argv[2:]:
    image = Image.open(path).convert("L" if pixels["channels"] == 1 else "RGB")
    image = image.resize((pixels["size"],) * 2, Image.Resampling[pixels["interpolation"].upper()])
    values = np.asarray(image, np.float32).reshape(*image.size, -1) / 255
    values = ((values - pixels["mean"]) / pixels["std"]).transpose(2, 0, 1)[None]
    chances = session.run(None, {"images": values.astype(np.float32)})[0][0]
    print(classes[chances.argmax()], f"{chances.max():.3f}")
assert "torch" not in sys.modules
"""
(work / "run.py").write_text(program)
images = [str(data / "test" / name / "05.png") for name in ("anvil", "fish", "cow")]
command = [sys.executable, str(work / "run.py"), str(work / "model.onnx"), *images]
print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

# %% [markdown]
# The classifier itself gives the same answers.

# %%
print(classifier(images, top=1))
