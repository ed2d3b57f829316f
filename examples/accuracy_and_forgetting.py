# %% [markdown]
# # Accuracy and forgetting
#
# A benchmark splits the data into tasks, learns them one after the other, and tests all tasks so far after each one.
# The result is a matrix: the accuracy on task *j* after task *t*. All measures are computed from it.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt

runs = Path(tempfile.mkdtemp())
command = ["bench", "pocket", "--methods", "ncm,ranpac", "--trials", "1", "--json"]
small = ["--set", "stream.train_images=20", "--set", "stream.test_images=5"]
subprocess.run(
    [sys.executable, "-m", "coda_prompt", *command, *small, "--out", str(runs)],
    check=True, capture_output=True,
)  # fmt: skip
results = {path.parts[-3]: json.loads(path.read_text()) for path in runs.rglob("result.json")}
list(results)

# %%
figure, axes = plt.subplots(1, len(results), figsize=(8, 3.4), layout="constrained")
for axis, (method, result) in zip(axes, sorted(results.items()), strict=True):
    matrix = 100 * np.array(result["matrix"], float)
    axis.imshow(matrix, vmin=0, vmax=100, cmap="cividis")
    for (after, task), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            axis.text(task, after, f"{value:.0f}", ha="center", va="center", color="white")
    axis.set(title=method, xlabel="task tested", ylabel="after task")

# %% [markdown]
# Each column shows how the accuracy on one task falls as others are learned. `coda_prompt.research.bench.metrics`
# implements the published definitions of accuracy and forgetting.

# %%
from coda_prompt.research.bench import metrics

for method, result in sorted(results.items()):
    matrix = np.array(result["matrix"], float)
    print(
        f"{method:8} A_N {100 * metrics.average_accuracy(matrix):5.1f} %   "
        f"forgetting {100 * metrics.forgetting_max(matrix):5.1f} points"
    )

# %% [markdown]
# `coda report RUNS` writes such figures and tables for all runs in a folder as one HTML page.
