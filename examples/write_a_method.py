# %% [markdown]
# # Write a method
#
# A method is a class in a file. This one classifies by the nearest class *median* of frozen features.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

work = Path(tempfile.mkdtemp())
(work / "mine.py").write_text('''
"""Nearest class median."""

import torch
from torch.nn import functional as F

from coda_prompt.research.methods.bank import Bank
from coda_prompt.research.methods.closedform import ClosedForm


class NearestMedian(ClosedForm):
    """Nearest class median of frozen features."""

    def __init__(self, backbone, config):
        super().__init__(backbone, config)
        self.medians = Bank((self.vit_config.width,))

    def begin_task(self, brief):
        super().begin_task(brief)
        new = self.classes_seen - len(self.medians)
        self.medians.append(torch.zeros(new, self.vit_config.width))

    def fit(self, features, queries, labels):
        for row in labels.unique():
            self.medians.frozen[row] = features[labels == row].median(dim=0).values

    def scores(self, queries):
        return 20 * F.normalize(queries, dim=-1) @ F.normalize(self.medians.rows, dim=-1).T
''')

# %% [markdown]
# Name it in a benchmark, beside methods of the package. This one has five tasks of sketches, twenty images of a class.

# %%
methods = f"{work}/mine.py:NearestMedian,ncm,ranpac"
command = ["bench", "pocket", "--methods", methods, "--trials", "1", "--json"]
small = ["--set", "stream.train_images=20", "--set", "stream.test_images=5"]
subprocess.run(
    [sys.executable, "-m", "coda_prompt", *command, *small, "--out", str(work / "runs")],
    check=True, capture_output=True,
)  # fmt: skip
for path in sorted((work / "runs").rglob("result.json")):
    final = json.loads(path.read_text())["matrix"][-1]
    print(f"{path.parts[-3]:24} {sum(final) / len(final):.1%}")

# %% [markdown]
# A method that trains derives from `PromptMethod` or `TrainedMethod`. The guide *Add a method* describes the contract.
