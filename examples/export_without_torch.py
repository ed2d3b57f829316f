# %% [markdown]
# # Export and run without coda-prompt
#
# `export_onnx` (or `coda export`) writes one ONNX graph from pixels to calibrated probabilities, and `predict.py` beside
# it: a program that needs onnxruntime, NumPy and Pillow only, and reads images as the classifier does.

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
images = [f"data/test/{name}/05.png" for name in ("anvil", "fish", "cow")]
command = [sys.executable, "predict.py", "model.onnx", *images]
print(subprocess.run(command, cwd=work, check=True, capture_output=True, text=True).stdout)

# %% [markdown]
# The classifier itself gives the same answers.

# %%
print(classifier([work / each for each in images], top=1))
